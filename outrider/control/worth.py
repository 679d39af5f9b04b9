"""Worth: how deep an expensive drafter is asked in a step, from what its candidates have brought per second so far.

Whenever it was asked, the step is weighed as it would have been with each smaller depth and without the drafter at all:
the chances of the candidates are known, and so are the seconds. Steps are told apart by what the cheap drafters expect
alone: where they copy a long passage nothing is left to gain, and where it did not pay with less it is not expected to
pay with more. Changes no output. Cost: microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from outrider.compiled import compiled

GRADES = (0.15, 0.4, 0.8, 1.5, 3.0)  # candidates that the cheap drafters expect to be accepted: bounds of the kinds


@dataclass(slots=True)
class Depths:
    """What each depth has brought in steps of one kind: mean logarithm of its speed over that without the drafter."""

    gains: NDArray[np.float64]  # [depth + 1]
    seen: int = 0  # times that the whole depth was asked
    idle: int = 0  # steps since then
    silent: int = 0  # steps since anything was learnt
    patience: int = 16  # steps before the whole depth is tried again


@dataclass(slots=True)
class Worth:
    deepest: int
    trials: int = 2  # of the whole depth, before anything is believed
    keep: float = 0.95
    margin: float = 0.05  # of speed that being asked must bring
    explore: float = 0.02  # of the time: what tries of the whole depth may cost
    most_patience: int = 256
    whole: bool = False  # it runs all its levels, however few it is asked for
    _kinds: list[Depths] = field(init=False)
    _times: dict[int, deque[float]] = field(default_factory=dict)  # recent seconds by depth asked
    _late: dict[int, float] = field(default_factory=dict)  # seconds of the first one that came after a pause
    _busy: bool = False  # whether it was asked in the last step

    def __post_init__(self) -> None:
        self._kinds = [Depths(np.zeros(self.deepest + 1)) for _ in range(len(GRADES) + 1)]

    def depth(self, cheap: float, room: int) -> int:
        """How deep to ask where the others expect `cheap` accepted candidates; 0: not at all."""
        kind, most = self._kind(cheap), min(room, self.deepest if self._late or self._times else 1)
        untried = kind.seen < self.trials and not self._hopeless(cheap)
        if untried or kind.idle >= kind.patience:
            return most
        return int(kind.gains[: most + 1].argmax())

    def time(self, depth: int, seconds: float) -> None:
        """Changes state: a proposal of this depth took so long; 0: none was asked for in this step.

        After a pause a drafter has text to catch up with, which says nothing of what it takes when asked in every step:
        such a proposal counts only while no other of its depth is known.
        """
        if depth and self._busy:
            self._times.setdefault(depth, deque(maxlen=9)).append(seconds)
        elif depth:
            self._late.setdefault(depth, seconds)
        self._busy = depth > 0

    def seconds(self, depth: int) -> NDArray[np.float64]:
        """[depth + 1]: what proposals of depth 0, 1, ... take; one never tried is judged by the next deeper one.

        Beyond the deepest that was tried the time of a level goes on.
        """
        out = np.zeros(depth + 1)
        took = self._late | {d: median(times) for d, times in self._times.items()}
        level = {d: seconds / (d + 1) for d, seconds in took.items()}
        known = level[max(level)] if level else 0.0
        if self.whole:
            out[1:] = known * (max(level) + 1) if level else 0.0
            return out
        for d in range(max([depth, *level]), 0, -1):
            known = level.get(d, known)
            if d <= depth:
                out[d] = known * (d + 1)
        return np.minimum.accumulate(out[::-1])[::-1]  # a shallower one takes no longer than a deeper one

    def least(self, plain: float) -> float:
        """How likely a path must be to be worth another level, where a step without candidates takes so long.

        A level must bring more tokens than plain steps would in its time, each sequence its own share of both; what
        follows a path is less likely still.
        """
        return min(2 * float(self.seconds(self.deepest)[-1]) / (self.deepest + 1) / plain, 0.9)

    def learn(self, cheap: float, rates: NDArray[np.float64]) -> None:
        """Changes state: tokens per second of a step with the drafter 0, 1, ... deep, as far as it was asked."""
        kind, asked = self._kind(cheap), len(rates) - 1
        gains = np.log(rates / rates[0])
        gains[1:] -= self.margin
        if kind.seen == 0:
            kind.gains[: asked + 1] = gains
        else:
            share = 1 - self.keep ** (1 + kind.silent / 8)  # the longer nothing was tried, the less the past is worth
            moves = share * (gains - kind.gains[: asked + 1])
            kind.gains[: asked + 1] += moves
            kind.gains[asked + 1 :] += moves[-1]  # what lies deeper stays as far from this as it was
        kind.silent = 0
        if asked == self.deepest:
            useless = kind.seen >= self.trials and gains.argmax() == 0
            dear = int((np.exp(-gains[-1]) - 1) / self.explore)
            kind.patience = min(max(2 * kind.patience if useless else 16, dear), self.most_patience)
            kind.seen, kind.idle = kind.seen + 1, 0

    def pass_by(self, cheap: float) -> None:
        """Changes state: a step of this kind did without the whole depth."""
        kind = self._kind(cheap)
        kind.idle, kind.silent = kind.idle + 1, kind.silent + 1

    def _kind(self, cheap: float) -> Depths:
        return self._kinds[bisect_left(GRADES, cheap)]

    def _hopeless(self, cheap: float) -> bool:
        """Being asked did not pay where the others expect less, and so left more to gain."""
        poorer = self._kinds[: bisect_left(GRADES, cheap)]
        return any(kind.seen >= self.trials and kind.gains.argmax() == 0 for kind in poorer)


@compiled
def rates(weights, order, masks, depths, alone, step, draft):  # type: ignore[no-untyped-def]
    """Best tokens per second with the drafter whose own candidates have the mask `alone` cut to depth 0, 1, ...

    `step`: seconds by candidates verified; `draft`: seconds of all drafting by depth.
    """
    out = np.zeros(len(draft))
    for depth in range(len(draft)):
        gain, taken = 1.0, 0
        out[depth] = gain / (step[0] + draft[depth])
        for node in order:
            if masks[node] == alone and depths[node] > depth:
                continue
            taken += 1
            if taken >= len(step):
                break
            gain += weights[node]
            out[depth] = max(out[depth], gain / (step[taken] + draft[depth]))
    return out
