"""Backoff: switches speculation off for a while where it has lately been slower than plain decoding.

Tokens per second of the last speculative steps are held against those of plain steps; where they are fewer, speculation
rests, and each rest that follows a failed trial is twice as long as the one before. Plain decoding is timed by a few
plain steps in a row, because a runtime may run for some steps in the size of the last wide one, so that a single plain
step between speculative ones is too slow. It is never too fast: a single one that was faster than what was known
replaces it at once. Measures and counts only; changes no output. Cost: microseconds a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

LOOK = 3  # plain steps in a row that are enough to know what they cost
KEPT = 5  # plain steps that are remembered: LOOK new ones outweigh all before them
PERIOD = 4  # steps from one judgement to the next
SETTLED = 8  # plain steps in a row after which a runtime has forgotten a wider one


@dataclass(slots=True)
class Backoff:
    """Of the steps of one batch size: `resting` says for how many steps nothing is to be drafted."""

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
    _unseen: int = 0  # steps since it was last timed, or was to be
    _due: int = 32  # steps after which a new text begins with plain ones; doubles each time, up to `_most_due`
    _most_due: int = 128  # half of `old`, or four times `old` where speculation is far ahead
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds of a step
    _unjudged: int = 0  # steps since it was last judged
    _new: int = 0  # texts that have begun since it was last woken, or went to rest
    _tried: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=48))  # tokens, seconds since a rest

    @property
    def known(self) -> bool:
        """Whether a plain step was ever timed."""
        return bool(self._plain)

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
            else:  # no plain step has been timed yet: other candidates ran beside those that were to tell
                self.resting = LOOK

    def pass_by(self) -> None:
        """Changes state: a step went by whose seconds say nothing, so that a rest ends under any load."""
        self.resting = max(self.resting - 1, 0)

    def see(self, seconds: float) -> None:
        """Changes state: a plain step took so long; plain decoding need not be timed again for a while."""
        self._plain.append(seconds)
        self._age = self._unseen = 0

    def wake(self, members: int = 1) -> None:
        """Changes state: a text has begun, one of so many. Once they all may be others a rest ends.

        But for a few plain steps, where plain decoding is being timed or is due to be.
        """
        self._new += 1
        if self._new < members:
            return
        self._new = 0
        if self._unseen > self._due:
            self.resting, self._unseen, self._due = LOOK, 0, min(2 * self._due, self._most_due)
        self.resting = min(self.resting, LOOK)

    def _judge(self, plain: float) -> None:
        """Changes state: rest where the last steps gave fewer tokens per second than plain ones."""
        speed = _speed(self._tried)
        self._most_due = self.old // 2 if speed < self.doubt * plain else 4 * self.old
        if speed < self.margin * plain:
            self._patience = self.resting = min(2 * self._patience or self.rest, self.longest)
            self._new = 0
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
    longest = 2 * median(seconds)
    return sum(tokens) / sum(min(step, longest) for step in seconds)
