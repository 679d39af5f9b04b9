"""Recordings: in which recorded size a pass runs, and when the sizes that are lacking are recorded.

A pass whose size is not recorded runs in a larger one that is, with padding, so that nobody waits for a recording. What
is lacking is recorded beforehand (`first`), and later a little between steps or while nobody waits (`spare`): sizes
that were wanted most come first, those of earlier starts among them. Only where nothing holds a pass is its size
recorded when it is met again. Decides and counts; the device's work is its owner's. Cost: microseconds a pass.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.core.records import Needs
from outrider.runtime.cuda.packing import Bucket

FIRST_S = 4.0  # of recording before the first text; the rest comes while it is answered
SHARE = 0.05  # of the time between steps that may go into recordings
PAUSE_S = 1.0  # before it is asked again whether anything is lacking
WORTH = 64  # passes that must have wanted a size before it is recorded although another holds it


@dataclass(frozen=True, slots=True)
class Size:
    """What tells one recording from another."""

    bucket: Bucket
    hidden: tuple[int, ...] = ()  # layers whose states it leaves behind
    top: int = 0  # likeliest tokens of each row

    @classmethod
    def of(cls, bucket: Bucket, needs: Needs) -> Size:
        return cls(bucket, needs.hidden, needs.top)

    def holds(self, other: Size) -> bool:
        more = self.top >= other.top and {*self.hidden} >= {*other.hidden}
        return more and self.bucket.holds(other.bucket)

    @property
    def cost(self) -> tuple[int, ...]:
        """By which the cheapest of several is found."""
        return *self.bucket.cost, len(self.hidden), self.top


class Recorded(Protocol):
    """A pass of one size: it runs as it is before it is a graph."""

    uses: int  # passes that ran
    tried: bool  # whether it was to be recorded
    graph: bool  # and is


S = TypeVar("S", bound=Recorded)


class Recordings(Generic[S]):
    def __init__(
        self, make: Callable[[Size], S], record: Callable[[S], None], *, known: Mapping[Size, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`make` sets one up, `record` turns it into a graph if it can. `known`: how often sizes were wanted before."""
        self._make, self._record, self._clock = make, record, clock
        self.steps: dict[Size, S] = {}
        self.wanted = Counter(known or {})
        self._cover: list[Size] = []  # to be recorded in any case
        self._held: dict[Size, Size] = {}  # what a size runs in, as of now
        self._not_before = 0.0  # the next recording between steps: what one takes is spread over the steps behind it

    def at(self, size: Size) -> S:
        """Changes state: as it is, recorded or not."""
        if size not in self.steps:
            self.steps[size] = self._make(size)
        return self.steps[size]

    def find(self, wanted: Size) -> Size:
        """Changes state: the size that such a pass runs in now, one that holds it."""
        self.wanted[wanted] += 1
        if wanted not in self._held:
            holding = [size for size, step in self.steps.items() if step.graph and size.holds(wanted)]
            if not holding:
                step = self.at(wanted)
                if step.uses and not step.tried:
                    self.record(wanted)
                return wanted
            self._held[wanted] = min(holding, key=lambda size: size.cost)
        return self._held[wanted]

    def record(self, size: Size) -> None:
        """Changes state: it is tried once."""
        step = self.at(size)
        if not step.tried:
            begun = self._clock()
            self._record(step)
            self._held.clear()
            self._not_before = (now := self._clock()) + (now - begun) / SHARE

    def first(self, cover: Iterable[Size], seconds: float | None = FIRST_S) -> None:
        """Changes state: records what is wanted most of these and of what earlier starts wanted, for about so long.

        What is left is recorded later; None: all of it now.
        """
        self._cover += [size for size in cover if size not in self._cover]
        until = None if seconds is None else self._clock() + seconds
        while (until is None or self._clock() < until) and (size := self._next()) is not None:
            self.record(size)

    def spare(self, idle: bool = False) -> bool:
        """Changes state: records one size if it is time, between steps a small share of it; whether there is more."""
        if not idle and self._clock() < self._not_before:
            return True
        if (size := self._next()) is None:
            self._not_before = self._clock() + PAUSE_S
            return False
        self.record(size)
        return True

    def _next(self) -> Size | None:
        """What is to be recorded next: what nothing holds, then what would run in fewer rows than it does now."""
        ready = [size for size, step in self.steps.items() if step.graph]
        by_use = [size for size, uses in self.wanted.most_common() if uses >= WORTH]
        untried = [size for size in (*by_use, *self._cover) if size not in self.steps or not self.steps[size].tried]
        bare = (size for size in untried if not any(one.holds(size) for one in ready))
        narrower = (size for size in untried if size in self.wanted and self._padded(size))
        return next(bare, None) or next(narrower, None)

    def _padded(self, size: Size) -> bool:
        """Whether such passes run in more rows than theirs, or multiply more by the vocabulary."""
        holding = [one.bucket for one, step in self.steps.items() if step.graph and one.holds(size)]
        return all(one.cost[:2] > size.bucket.cost[:2] for one in holding)
