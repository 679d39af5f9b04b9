"""Step cost: seconds of a step by its rows, from a curve measured once and corrected by what steps really take.

The curve knows sizes that were never tried, the steps know this context, this batch and what else the machine does; the
correction is the ratio of the two at the sizes seen, carried over to their neighbours. Sizes up to the same power of
two count together, so that a longer context is noticed within a few steps. A size seen once or twice counts as all
others do: what is made ready at its first step would otherwise keep it from ever being tried again. Fewer rows are
never taken to cost more, for they could be run as more. Changes no output.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

ENOUGH = 3  # steps of a size that tell what it costs
WINDOW = 2 * ENOUGH - 1  # of them that are remembered: so many new ones outweigh the old


@dataclass(slots=True)
class StepCost:
    curve: Callable[[int], float]  # seconds by rows in all; more never cost less
    _ratios: dict[int, dict[int, deque[tuple[int, float]]]] = field(default_factory=dict)  # rows and seen / expected
    _expected: dict[int, float] = field(default_factory=dict)

    def add(self, rows: int, batch: int, seconds: float) -> None:
        """Changes state: a step of `rows` in all over `batch` sequences took so long."""
        seen = self._ratios.setdefault(batch, defaultdict(lambda: deque(maxlen=WINDOW)))
        seen[_size(rows)].append((rows, seconds / self._expect(rows)))

    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """[most + 1]: steps of `batch` sequences with 0, 1, ... candidates in all."""
        rows = np.arange(batch, batch + most + 1)
        every = np.array([self._expect(int(r)) for r in rows]) * self._corrections(batch, rows)
        return np.minimum.accumulate(every[::-1])[::-1]

    def _corrections(self, batch: int, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Linear between the sizes that are known well, flat beyond them."""
        seen = self._ratios.get(batch)
        if not seen:
            return np.ones(len(rows))
        known = [zip(*seen[size], strict=True) for size in sorted(seen) if len(seen[size]) >= ENOUGH]
        if not known:
            return np.full(len(rows), median(ratio for own in seen.values() for _, ratio in own))
        sizes, ratios = zip(*((median(at), median(own)) for at, own in known), strict=True)
        return np.interp(rows, sizes, ratios)

    def _expect(self, rows: int) -> float:
        if rows not in self._expected:
            self._expected[rows] = max(self.curve(rows), 1e-9)
        return self._expected[rows]


def _size(rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ...: steps of about the same size, which runtimes make the same."""
    return (rows - 1).bit_length()
