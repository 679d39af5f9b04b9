"""Fixed: the same budget at every step, whatever happened before.

The baseline of all controllers, and what methods use that decide by themselves how much to draft. Lossless; costs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.proposals import Proposals, everything
from outrider.core.records import Budget, Load, StepRecord, StepTiming
from outrider.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Fixed:
    budget: Budget
    name: str = "fixed"

    def begin(self, slot: int) -> None:
        pass

    def end(self, slot: int) -> None:
        pass

    def plan(self, slots: Sequence[int], limits: Sequence[Budget], load: Load) -> list[Budget]:
        return [self.budget & limit for limit in limits]

    def size(
        self, slots: Sequence[int], proposals: Proposals, budgets: Sequence[Budget], load: Load, seconds: float
    ) -> list[TokenTree]:
        return everything(proposals, [budget.nodes for budget in budgets])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        pass
