"""Step cost: seconds of a step by its rows, from a curve measured once and corrected by what steps really take.

The curve knows sizes that were never tried, the steps know this context, this batch and what else the machine does; the
correction is the ratio of the two at the sizes seen, carried over to their neighbours. Changes no output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.control.payoff import Costs


@dataclass(slots=True)
class StepCost:
    curve: Callable[[int], float]  # seconds by rows in all; more never cost less
    _ratios: dict[int, Costs] = field(default_factory=dict)  # by batch size: seen over expected, by rows
    _expected: dict[int, float] = field(default_factory=dict)

    def add(self, rows: int, batch: int, seconds: float) -> None:
        """Changes state: a step of `rows` in all over `batch` sequences took so long."""
        self._ratios.setdefault(batch, Costs()).add(rows, seconds / self._expect(rows))

    def seconds(self, batch: int, most: int) -> NDArray[np.float64]:
        """[most + 1]: steps of `batch` sequences with 0, 1, ... candidates in all."""
        rows = np.arange(batch, batch + most + 1)
        expected = np.array([self._expect(int(r)) for r in rows])
        return expected * self._ratios[batch].curve(rows) if batch in self._ratios else expected

    def _expect(self, rows: int) -> float:
        if rows not in self._expected:
            self._expected[rows] = max(self.curve(rows), 1e-9)
        return self._expected[rows]
