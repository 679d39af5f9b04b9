"""Open: offers the whole budget and leaves the size to a drafter that ranks its candidates by cost; tells it the cost.

For drafters of point masses only, which may be cut after they were proposed. Where speculating has been slower than
plain decoding, drafting included, it rests: nothing is drafted for a while, then a few steps try again. Now and then a
step runs plainly anyway, so that the cost of plain decoding is never stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.protocols import Budget, StepRecord, StepTiming


@dataclass(slots=True)
class _Pace:
    """Plain and speculative steps of one batch size."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=9))  # seconds of a step
    tried: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=48))  # tokens, seconds since a rest
    resting: int = 0  # plain steps still to come
    patience: int = 0  # length of the next rest; 0: the first


@dataclass(slots=True)
class Open:
    limit: Budget
    tell: Callable[[int, int, float], None]  # rows, batch, seconds of every step without drafting
    plain_every: int = 96  # speculative steps before a plain one; what it costs is below a percent
    trial: int = 24  # speculative steps before they are judged; half of them after a rest
    rest: int = 32  # length of the first rest; each that follows a failed trial is twice as long
    longest: int = 512
    margin: float = 0.97  # of plain decoding's speed: below it speculation rests
    name: str = "open"
    _paces: dict[int, _Pace] = field(default_factory=dict)  # by batch size
    _since_plain: int = 0

    def begin(self, slot: int) -> None:
        """Nothing is kept by sequence."""

    def end(self, slot: int) -> None:
        """Nothing is kept by sequence."""

    def budgets(self, slots: Sequence[int], limits: Sequence[Budget]) -> list[Budget]:
        if self._pace(len(slots)).resting or self._since_plain >= self.plain_every:
            return [Budget(0, 0)] * len(slots)
        return [self.limit & limit for limit in limits]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord], timing: StepTiming) -> None:
        self.tell(timing.rows, timing.batch, timing.total - timing.draft)
        pace = self._pace(len(slots))
        if pace.resting or self._since_plain >= self.plain_every:
            pace.plain.append(timing.total)
            pace.resting = max(0, pace.resting - 1)
            self._since_plain = 0
            return
        self._since_plain += 1
        pace.tried.append((sum(len(record.emitted) for record in records), timing.total))
        if len(pace.tried) >= (self.trial // 2 if pace.patience else self.trial):
            self._judge(pace, len(slots))

    def _judge(self, pace: _Pace, batch: int) -> None:
        """Changes state: rest where the last steps were slower than plain ones."""
        if not pace.plain:
            self._since_plain = self.plain_every  # a plain step comes next, to compare with
        elif _speed(pace.tried) < self.margin * batch / median(pace.plain):
            pace.patience = min(2 * pace.patience or self.rest, self.longest)
            pace.resting = pace.patience
            pace.tried.clear()
        elif len(pace.tried) == pace.tried.maxlen:
            pace.patience = 0

    def _pace(self, batch: int) -> _Pace:
        return self._paces.setdefault(batch, _Pace())


def _speed(steps: Iterable[tuple[int, float]]) -> float:
    """Tokens per second; what was compiled or recorded in one of these steps is not its usual cost."""
    tokens, seconds = zip(*steps, strict=True)
    most = 2 * median(seconds)
    return sum(tokens) / sum(min(own, most) for own in seconds)
