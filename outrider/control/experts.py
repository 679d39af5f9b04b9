"""Active experts: what the choices of a mixture model's routers add to the cost of a step.

A step reads the weights of every expert that one of its rows was sent to. How many those are follows from the text:
rows of one topic share experts, alternatives in a tree often do not. So what a step costs is taken apart into its rows,
by the curve that was measured, and the experts that it touches, at the seconds each of them takes. Every pass tells how
far the experts of its rows overlap, and that tells for any other number of rows how many there would be:

    touched(n) = E (1 - (1 - k / E) ^ (n ^ spread))      k experts of E for one row

With spread 1 rows choose independently, with 0 all choose alike. Changes no output. Cost: microseconds a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

REMEMBERED = 3  # passes that tell how far experts overlap in the text as it is now
FULL = 0.999  # of all experts: beyond it nothing can be said of the overlap
MOVED = 0.02  # a change of the spread that estimates are made anew for


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """What timed steps of a mixture model have shown. Experts are those of a layer, on average."""

    total: float
    rows: tuple[int, ...]
    touched: tuple[float, ...]  # by the trees that the curve was measured with, at these rows
    seconds: float  # that a step takes for each expert more

    @classmethod
    def of(
        cls, total: float, rows: tuple[int, ...], mixed: tuple[float, ...], alike: dict[int, tuple[float, float]],
        seconds: tuple[float, ...],
    ) -> ExpertCosts:  # fmt: skip
        """From steps with the curve's trees (`mixed` experts, `seconds`) and, at some of the sizes, with trees whose
        candidates are all the same token: these have as many rows and fewer experts."""
        fewer, saved = [], []
        for count, (touched, taken) in alike.items():
            place = rows.index(count)
            fewer.append(mixed[place] - touched)
            saved.append(seconds[place] - taken)
        less, time = np.array(fewer), np.array(saved)
        slope = float(less @ time / (less @ less)) if less @ less > 0 else 0.0
        return cls(total, rows, mixed, max(slope, 0.0))


@dataclass(slots=True)
class ExpertUse:
    """How many experts steps touch, learnt from every pass."""

    last: Callable[[], float]  # experts that the last pass has touched
    costs: ExpertCosts
    _spreads: dict[int, deque[float]] = field(default_factory=dict)  # by batch size

    def see(self, batch: int, rows: int) -> tuple[float, bool]:
        """Changes state: the experts that the last pass has touched, and whether it changed what is expected."""
        touched, before = self.last(), self.spread(batch)
        one, all_of_them = self.costs.touched[0], self.costs.total
        if rows > 1 and 0 < one < all_of_them:
            share = min(max(touched, one), FULL * all_of_them) / all_of_them
            spread = np.log(np.log1p(-share) / np.log1p(-min(one / all_of_them, FULL))) / np.log(rows)
            self._spreads.setdefault(batch, deque(maxlen=REMEMBERED)).append(float(np.clip(spread, 0.0, 1.5)))
        after = self.spread(batch)
        return touched, after is not None and (before is None or abs(after - before) > MOVED)

    def spread(self, batch: int) -> float | None:
        """Of the experts of this many sequences now; None: nothing is known."""
        return median(self._spreads[batch]) if batch in self._spreads else None

    def touched(self, batch: int, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """[len(rows)]: experts that steps of so many rows are expected to touch."""
        spread = self.spread(batch)
        if spread is None:
            return self._measured(rows)
        share = self.costs.touched[0] / self.costs.total
        missed: NDArray[np.float64] = (1.0 - share) ** (rows.astype(np.float64) ** spread)
        return self.costs.total * (1.0 - missed)

    def seconds(
        self, rows: NDArray[np.int64], curve: NDArray[np.float64], touched: NDArray[np.float64], least: float
    ) -> NDArray[np.float64]:
        """The curve's seconds at these rows, for steps that touch so many experts; never below those of one row."""
        found: NDArray[np.float64] = curve + self.costs.seconds * (touched - self._measured(rows))
        return np.maximum(found, np.minimum(least, curve))

    def _measured(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.interp(rows, self.costs.rows, self.costs.touched)
