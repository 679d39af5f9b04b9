"""Pace: whether decoding with speculation has lately been slower than without it, and how long to rest where it has.

A single plain step between speculative ones does not say what plain decoding costs: a runtime may go on for some steps
in the size of the last wide one. So plain decoding is timed where steps are plain in a row, and speculation by whole
stretches, the steps that it slows down included. Measures and counts only; changes no output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

LOOK = 2  # plain steps that are enough to know what they cost: of two the faster one counts
SETTLED = 8  # plain steps in a row after which a runtime has forgotten a wider one


@dataclass(slots=True)
class Pace:
    """Steps of one batch size."""

    trial: int = 24  # steps before they are judged; half of them after a rest
    rest: int = 32  # length of the first rest; each that follows a failed trial is twice as long
    longest: int = 512
    margin: float = 0.97  # of plain decoding's speed: below it speculation rests
    doubt: float = 1.3  # below so many times its speed old figures of plain decoding are taken afresh
    old: int = 256  # steps that make them old
    resting: int = LOOK  # plain steps still to come; the first ones are to compare with
    _patience: int = 0  # length of the last rest; 0: none yet
    _in_a_row: int = SETTLED  # plain steps; nothing wide was there before the first step
    _age: int = 0  # steps since plain decoding was timed
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=9))  # seconds of a step
    _tried: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=48))  # tokens, seconds since a rest

    @property
    def settled(self) -> bool:
        """The last step was plain and as fast as plain steps are."""
        return self._in_a_row > SETTLED

    def add(self, wide: bool, drafted: bool, batch: int, tokens: int, seconds: float) -> None:
        """Changes state: a step gave `tokens`; `wide`: it had candidates, `drafted`: they were asked for."""
        self._in_a_row = 0 if wide else self._in_a_row + 1
        self._age += 1
        if self.settled and not drafted:
            self._plain.append(seconds)
            self._age = 0
        if self.resting:
            self.resting -= 1
            return
        self._tried.append((tokens, seconds))
        if len(self._tried) >= (self.trial // 2 if self._patience else self.trial):
            self._judge(batch / typical(self._plain))

    def wake(self) -> None:
        """Changes state: what is left of a rest is not needed; a look at plain decoding stays."""
        self.resting = min(self.resting, LOOK)

    def _judge(self, plain: float) -> None:
        """Changes state: rest where the last steps gave fewer tokens per second than plain ones."""
        speed = _speed(self._tried)
        if speed < self.margin * plain:
            self._patience = self.resting = min(2 * self._patience or self.rest, self.longest)
            self._tried.clear()
        elif speed < self.doubt * plain and self._age > self.old:
            self.resting = SETTLED + LOOK
        elif len(self._tried) == self._tried.maxlen:
            self._patience = 0


def typical(seconds: Sequence[float]) -> float:
    """The median; of few the fastest, because what comes in between only ever makes a step slower."""
    return median(seconds) if len(seconds) > 2 else min(seconds)


def _speed(steps: Iterable[tuple[int, float]]) -> float:
    """Tokens per second; what was compiled or recorded in one of these steps is not its usual cost."""
    tokens, seconds = zip(*steps, strict=True)
    most = 2 * median(seconds)
    return sum(tokens) / sum(min(own, most) for own in seconds)
