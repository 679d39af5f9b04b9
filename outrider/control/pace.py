"""Pace: whether decoding with speculation has lately been slower than without it, and how long to rest where it has.

A single plain step between speculative ones does not say what plain decoding costs: a runtime may go on for some steps
in the size of the last wide one. So plain decoding is timed where steps are plain in a row, and speculation by whole
stretches, the steps that it slows down included. A single plain step can only be too slow, so one that was faster than
believed counts as well: the first steps of a process are slow, and a belief that flatters speculation is not shaken by
it. Measures and counts only; changes no output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

LOOK = 3  # plain steps that are enough to know what they cost
KEPT = 5  # of them that are remembered: one look outweighs all before it
PERIOD = 4  # steps from one judgement to the next
SETTLED = 8  # plain steps in a row after which a runtime has forgotten a wider one


@dataclass(slots=True)
class Pace:
    """Steps of one batch size."""

    trial: int = 24  # steps before they are judged; half of them after a rest
    rest: int = 32  # length of the first rest; each that follows a failed trial is twice as long
    longest: int = 512
    margin: float = 0.97  # of plain decoding's speed: below it speculation rests
    doubt: float = 1.3  # below so many times its speed old figures of plain decoding are taken afresh
    old: int = 256  # steps that make them old; four times as many whatever the speed
    resting: int = LOOK  # plain steps still to come; the first ones are to compare with
    plain: bool = False  # the last step was plain, nothing was drafted for it, and it was as fast as plain steps are
    _patience: int = 0  # length of the last rest; 0: none yet
    _in_a_row: int = SETTLED  # plain steps; nothing wide was there before the first step
    _age: int = 0  # steps since plain decoding was timed
    _unseen: int = 0  # steps since it was last looked at, whatever was seen
    _due: int = 32  # steps after which a new text begins with a look; twice as many after each, up to `_most_due`
    _most_due: int = (
        128  # half of `old`; as many as make figures old whatever the speed, where speculation is far ahead
    )
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds of a step
    _unjudged: int = 0  # steps since it was last judged
    _tried: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=48))  # tokens, seconds since a rest

    def add(self, wide: bool, drafted: bool, batch: int, tokens: int, seconds: float) -> None:
        """Changes state: a step gave `tokens`; `wide`: it had candidates, `drafted`: they were asked for."""
        self._in_a_row = 0 if wide else self._in_a_row + 1
        self._age, self._unseen = self._age + 1, self._unseen + 1
        as_usual = self._in_a_row > SETTLED or not self._plain or seconds < typical(self._plain)
        self.plain = not wide and not drafted and as_usual
        if self.plain:
            self.see(seconds)
        if self.resting:
            self.resting -= 1
            return
        self._tried.append((tokens, seconds))
        self._unjudged += 1
        if len(self._tried) >= (self.trial // 2 if self._patience else self.trial) and self._unjudged >= PERIOD:
            self._unjudged = 0
            if self._plain:
                self._judge(batch / typical(self._plain))
            else:  # the steps that were to tell had something else beside them
                self.resting = LOOK

    def see(self, seconds: float) -> None:
        """Changes state: so long a plain step takes now; nobody has to look for a while."""
        self._plain.append(seconds)
        self._age = self._unseen = 0

    def wake(self) -> None:
        """Changes state: what is left of a rest is not needed; a look at plain decoding stays, or is due again."""
        if self._unseen > self._due:
            self.resting, self._unseen, self._due = LOOK, 0, min(2 * self._due, self._most_due)
        self.resting = min(self.resting, LOOK)

    def _judge(self, plain: float) -> None:
        """Changes state: rest where the last steps gave fewer tokens per second than plain ones."""
        speed = _speed(self._tried)
        self._most_due = self.old // 2 if speed < self.doubt * plain else 4 * self.old
        if speed < self.margin * plain:
            self._patience = self.resting = min(2 * self._patience or self.rest, self.longest)
            self._tried.clear()
        elif self._age > (self.old if speed < self.doubt * plain else 4 * self.old):
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
