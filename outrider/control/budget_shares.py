"""Budget shares: how much of a mixture's budget each drafter that samples gets, before it draws.

The share follows how many of the accepted tokens came from it in recent steps. Lossless: decided from past steps only.
Cost: microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.records import StepRecord


@dataclass(slots=True)
class BudgetShares:
    count: int  # drafters that sample
    least: float = 0.1  # enough to notice when a drafter becomes useful again
    together: float = 0.75  # at most for all of them; the rest is for drafters of point masses
    keep: float = 0.97  # how much of the record each step leaves
    _won: NDArray[np.float64] = field(
        init=False
    )  # accepted tokens by drafter; in the last place those of all that do not sample

    def __post_init__(self) -> None:
        self._won = np.ones(self.count + 1)

    def now(self) -> list[float]:
        if not self.count:
            return []
        share = np.maximum(self._won[:-1] / self._won.sum(), self.least)
        return (share * min(1.0, self.together / share.sum())).tolist()

    def learn(self, record: StepRecord, names: Sequence[str]) -> None:
        """Changes state: who proposed what was accepted."""
        self._won *= self.keep
        for node in record.verdict.path:
            origin = record.tree.origins[node] if record.tree.origins else ""
            self._won[names.index(origin) if origin in names else -1] += 1 - self.keep
