"""Shares: which part of the budget each drafter that draws gets, by how much of what was accepted came from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.protocols import StepRecord


@dataclass(slots=True)
class Shares:
    count: int
    least: float = 0.1  # enough to notice when a drafter becomes useful again
    most: float = 0.75  # what they leave to drafters of point masses
    keep: float = 0.97
    _won: NDArray[np.float64] = field(init=False)  # accepted tokens by drafter, those that do not draw together last

    def __post_init__(self) -> None:
        self._won = np.ones(self.count + 1)

    def now(self) -> list[float]:
        if not self.count:
            return []
        share = np.maximum(self._won[:-1] / self._won.sum(), self.least)
        return (share * min(1.0, self.most / share.sum())).tolist()

    def learn(self, record: StepRecord, names: Sequence[str]) -> None:
        """Changes state: who proposed what was accepted."""
        self._won *= self.keep
        for node in record.verdict.path:
            origin = record.tree.origins[node] if record.tree.origins else ""
            self._won[names.index(origin) if origin in names else -1] += 1 - self.keep
