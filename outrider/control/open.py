"""Open: offers the whole budget and leaves the size to a drafter that ranks its candidates by cost; tells it the cost.

For drafters of point masses only, which may be cut after they were proposed. Where speculating has been slower than
plain decoding, drafting included, it rests: nothing is drafted for a while, then a few steps try again. Where plain
steps between wide ones cost what they always do, each of them says what plain decoding takes now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.control.pace import Pace
from outrider.protocols import Budget, StepRecord, StepTiming


@dataclass(slots=True)
class Open:
    limit: Budget
    tell: Callable[[int, int, float], None]  # rows, batch, seconds without drafting of steps that cost what they do
    even: bool = False  # a plain step costs the same behind a wide one as behind another
    name: str = "open"
    _paces: dict[int, Pace] = field(default_factory=dict)  # by batch size

    def begin(self, slot: int) -> None:
        """Changes state: a new text may be another matter, so a rest ends."""
        for pace in self._paces.values():
            pace.wake()

    def end(self, slot: int) -> None:
        """Nothing is kept by sequence."""

    def budgets(self, slots: Sequence[int], limits: Sequence[Budget]) -> list[Budget]:
        if self._pace(len(slots)).resting:
            return [Budget(0, 0)] * len(slots)
        return [self.limit & limit for limit in limits]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        pace = self._pace(len(slots))
        tokens = sum(len(record.emitted) for record in records)
        wide = any(record.tree.candidates for record in records)
        alone = timing.total - timing.draft
        if self.even and not wide and not pace.resting:
            pace.see(alone)
        pace.add(wide, not pace.resting, len(slots), tokens, timing.total)
        if wide or pace.plain or self.even:
            self.tell(timing.rows, timing.batch, alone)

    def _pace(self, batch: int) -> Pace:
        """Lenient: candidates are weighed by what they cost, and a text that starts to repeat itself pays many times
        what drafting in vain takes; so it rests where costs are misjudged, not after some steps without luck."""
        return self._paces.setdefault(batch, Pace(rest=16, margin=0.94))
