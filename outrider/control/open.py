"""Open: offers the whole budget and leaves the size to a drafter that ranks its candidates by cost; tells it the cost.

For drafters of point masses only, which may be cut after they were proposed. Now and then a step runs plainly, so that
the cost of plain decoding is never stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.protocols import Budget, StepRecord, StepTiming


@dataclass(slots=True)
class Open:
    limit: Budget
    tell: Callable[[int, int, float], None]  # rows, batch, seconds of every step
    plain_every: int = 96  # speculative steps before a plain one; what it costs is below a percent
    name: str = "open"
    _since_plain: int = 0

    def begin(self, slot: int) -> None:
        """Nothing is kept by sequence."""

    def end(self, slot: int) -> None:
        """Nothing is kept by sequence."""

    def budgets(self, slots: Sequence[int], limits: Sequence[Budget]) -> list[Budget]:
        if self._since_plain >= self.plain_every:
            return [Budget(0, 0)] * len(slots)
        return [self.limit & limit for limit in limits]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        self.tell(timing.rows, timing.batch, timing.total)
        self._since_plain = 0 if timing.rows == timing.batch else self._since_plain + 1
