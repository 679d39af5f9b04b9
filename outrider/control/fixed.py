"""Fixed: the same budget at every step, whatever happened before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocols import Budget, StepRecord, StepTiming


@dataclass(frozen=True, slots=True)
class Fixed:
    budget: Budget
    name: str = "fixed"

    def begin(self, slot: int) -> None:
        pass

    def end(self, slot: int) -> None:
        pass

    def budgets(self, slots: Sequence[int], limits: Sequence[Budget]) -> list[Budget]:
        return [self.budget & limit for limit in limits]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        pass
