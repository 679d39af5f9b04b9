"""Draft depth: how many levels a drafter that runs a network is asked for in a step, from what each depth has gained.

Whenever it was asked, the step is also weighed as it would have been with each smaller depth and without the drafter:
the chances of the candidates are known by then, and so are the seconds. The gains are kept apart by how many accepted
tokens the cheap drafters expect alone: where they copy a long passage nothing is left to gain, and where asking did not
pay although they expected less, it is not tried where they expect more. Changes no output. Cost: microseconds a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled

PERIOD = 8  # proposals after which their times are looked at anew
GRADES = (0.15, 0.4, 0.8, 1.5, 3.0)  # candidates that the cheap drafters expect to be accepted: bounds of the kinds


@dataclass(slots=True)
class Gains:
    """What each depth has gained in steps of one kind: mean logarithm of its speed over that without the drafter."""

    gains: NDArray[np.float64]  # [depth + 1]
    seen: int = 0  # times that the whole depth was asked
    idle: int = 0  # steps since then
    silent: int = 0  # steps since anything was learnt
    patience: int = 16  # steps before the whole depth is tried again


@dataclass(slots=True)
class DraftDepth:
    """Of one drafter. A step's kind is the number of candidates that the others expect to be accepted, by `GRADES`."""

    deepest: int
    trials: int = 2  # of the whole depth, before anything is believed
    keep: float = 0.95
    margin: float = 0.05  # of speed that being asked must bring
    explore: float = 0.02  # of the time: what tries of the whole depth may cost
    longest_patience: int = 256
    whole: bool = False  # it runs all its levels, however few it is asked for
    _kinds: list[Gains] = field(init=False)
    _times: dict[int, deque[float]] = field(default_factory=dict)  # recent seconds of proposals, by depth
    _known: NDArray[np.float64] | None = None  # what `seconds` says, as of the last time that it was worked out
    _unread: int = 0  # proposals timed since then
    _late: dict[int, float] = field(default_factory=dict)  # the same of the first one that came after a pause
    _busy: bool = False  # whether it was asked in the last step

    def __post_init__(self) -> None:
        self._kinds = [Gains(np.zeros(self.deepest + 1)) for _ in range(len(GRADES) + 1)]

    def depth(self, cheap: float, room: int) -> int:
        """How deep to ask where the others expect `cheap` accepted candidates; 0: not at all."""
        kind, deepest = self._kind(cheap), min(room, self.deepest if self._late or self._times else 1)
        untried = kind.seen < self.trials and not self._hopeless(cheap)
        if untried or kind.idle >= kind.patience:
            return deepest
        return int(kind.gains[: deepest + 1].argmax())

    def time(self, depth: int, seconds: float) -> None:
        """Changes state: a proposal of this depth took so long; 0: none was asked for in this step.

        After a pause a drafter has text to catch up with, which says nothing of what it takes when asked in every step:
        such a proposal counts only while no other of its depth is known.
        """
        if depth and (self._times.get(depth) if self._busy else self._late.get(depth)) is None:
            self._known = None
        if depth and self._busy:
            self._times.setdefault(depth, deque(maxlen=9)).append(seconds)
            self._unread += 1
        elif depth:
            self._late.setdefault(depth, seconds)
        self._busy = depth > 0

    def seconds(self, depth: int) -> NDArray[np.float64]:
        """[depth + 1]: what proposals of depth 0, 1, ... take; one never tried is judged by the next deeper one.

        Beyond the deepest that was tried the time of a level goes on. Worked out anew every few proposals.
        """
        if self._known is None or self._unread >= PERIOD or depth >= len(self._known):
            self._known, self._unread = self._estimate(max(depth, self.deepest)), 0
        return self._known[: depth + 1]

    def _estimate(self, depth: int) -> NDArray[np.float64]:
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

    def ran(self, levels: int, asked: int) -> None:
        """Changes state: it ran so many levels where at most so many were asked for."""
        if levels > asked > 0 and not self.whole:
            self.whole, self._known = True, None

    def learn(self, cheap: float, rates: NDArray[np.float64]) -> None:
        """Changes state: tokens per second of a step with the drafter 0, 1, ... deep, as far as it was asked."""
        kind, asked = self._kind(cheap), len(rates) - 1
        # the longer nothing was tried, the less the past counts
        share = 1.0 if kind.seen == 0 else 1 - self.keep ** (1 + kind.silent / 8)
        best, gain = _learn(kind.gains, rates, self.margin, share, kind.seen > 0)
        kind.silent = 0
        if asked == self.deepest:
            useless = kind.seen >= self.trials and best == 0
            loss = int((math.exp(-gain) - 1) / self.explore)
            kind.patience = min(max(2 * kind.patience if useless else 16, loss), self.longest_patience)
            kind.seen, kind.idle = kind.seen + 1, 0

    def pass_by(self, cheap: float) -> None:
        """Changes state: a step of this kind did without the whole depth."""
        kind = self._kind(cheap)
        kind.idle, kind.silent = kind.idle + 1, kind.silent + 1

    def _kind(self, cheap: float) -> Gains:
        return self._kinds[bisect_left(GRADES, cheap)]

    def _hopeless(self, cheap: float) -> bool:
        """Whether asking did not even pay where the others expect less, and so left more to gain."""
        poorer = self._kinds[: bisect_left(GRADES, cheap)]
        return any(kind.seen >= self.trials and kind.gains.argmax() == 0 for kind in poorer)


@compiled
def _learn(gains, rates, margin, share, deeper):  # type: ignore[no-untyped-def]
    """Changes `gains`. Of this step: the depth that was best, and what the deepest asked for gained.

    What lies deeper than was asked stays as far from it as it was.
    """
    best, largest, gain, move = 0, 0.0, 0.0, 0.0
    for depth in range(len(rates)):
        gain = np.log(rates[depth] / rates[0]) - (margin if depth else 0.0)
        if gain > largest:
            best, largest = depth, gain
        move = share * (gain - gains[depth])
        gains[depth] += move
    if deeper:
        gains[len(rates) :] += move
    return best, gain


@compiled
def rates(weights, order, masks, depths, alone, step, draft):  # type: ignore[no-untyped-def]
    """Best tokens per second where candidates of mask `alone`, which one drafter alone proposes, end at depth 0, 1, ...

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


@compiled
def all_drafting(seconds, levels, spent, batch):  # type: ignore[no-untyped-def]
    """A sequence's share of all drafting, by the depth that the drafter is asked for: it took `seconds` by depth.

    It went no deeper than `levels`, and all drafting of the step took `spent`.
    """
    out = seconds.copy()
    out[levels:] = seconds[min(levels, len(seconds) - 1)]
    return (max(spent - out[-1], 0.0) + out) / batch
