"""Stopping: a chain that is asked after each token whether another one is worth drafting.

SpecDec++ (arXiv 2405.19715) ends a chain once it has probably been rejected already; SpecKV (arXiv 2605.02888) draws
on the drafter's entropy and confidence at every second token; other rules fit the same place.
Lossless: whether to go on is decided from tokens that stay in the chain. What a chain's marks say of a token is known
when the token has run, one token late: the one behind it is proposed by then, and costs nothing more. Cost: one source
call and one of the marks a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Marks, Noise, SharedNoise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.cost_aware import CallTimer, timed
from outrider.grow.drawing import DrawnTokens, independent
from outrider.grow.growth import Growth, unroll


@dataclass(slots=True)
class Drafted:
    """What is known of a chain of k tokens: the row behind each, and the marks of all but the last."""

    rows: list[QRow] = field(default_factory=list)  # k
    chances: list[float] = field(default_factory=list)  # k - 1: that a token is accepted once the one before it is
    whole: bool = False  # drafted as far as may be, to learn from


class Stop(Protocol):
    """Whether a chain is long enough. Must look at nothing but the chain and past steps."""

    def goes_on(self, drafted: Drafted) -> bool: ...
    def observe(self, drafted: Drafted, accepted: int) -> None: ...  # how many tokens of a chain stood


@dataclass(frozen=True, slots=True)
class Doubt:
    """SpecDec++'s rule: no further once some token has been rejected with a chance above h."""

    threshold: float = 0.3  # h; 0: as short as may be, 1: as long
    least: int = 2  # tokens

    def goes_on(self, drafted: Drafted) -> bool:
        if len(drafted.rows) < self.least:
            return True
        return 1.0 - float(np.prod(drafted.chances)) <= self.threshold

    def observe(self, drafted: Drafted, accepted: int) -> None:
        """Learns nothing."""


class Lengths(Protocol):
    """Chooses how long a chain should be, and learns from chains that were drafted whole."""

    def takes_whole(self) -> bool: ...  # changes state: whether the chain that begins now is one
    def length(self, features: NDArray[np.float64], drafted: int) -> int: ...
    def observe(self, features: Sequence[NDArray[np.float64]], accepted: int) -> None: ...


@dataclass(slots=True)
class Ladder:
    """SpecKV's rule: at every rung, from the tokens so far, whether a longer chain is worth more."""

    lengths: Lengths
    rungs: tuple[int, ...] = (2, 4, 6, 8)

    def goes_on(self, drafted: Drafted) -> bool:
        count = len(drafted.rows)
        if count == 1:
            drafted.whole = self.lengths.takes_whole()
        if count >= self.rungs[-1]:
            return False
        if drafted.whole or count not in self.rungs:
            return True
        return self.lengths.length(sureness(drafted.rows), count) > count

    def observe(self, drafted: Drafted, accepted: int) -> None:
        if len(drafted.rows) == self.rungs[-1]:
            self.lengths.observe([sureness(drafted.rows[:count]) for count in self.rungs], accepted)


def sureness(rows: Sequence[QRow]) -> NDArray[np.float64]:
    """Of drafted tokens: mean and largest entropy of their rows, mean and least chance of the likeliest."""
    entropies = [-float((q.probs * np.log(q.probs)).sum()) for q in rows]
    tops = [float(q.probs.max()) for q in rows]
    return np.array([np.mean(entropies), max(entropies), np.mean(tops), min(tops)])


@dataclass(slots=True)
class Stopping:
    stop: Stop
    marks: Marks | None = None
    ends: frozenset[int] = frozenset()  # tokens behind which there is no text
    shared: bool = False  # draws with the target's noise, for the rule that takes no other
    timer: CallTimer | None = None  # of the source's calls
    _drafted: dict[int, Drafted] = field(default_factory=dict)  # by slot, of the last step

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [_Path(Growth(*start), self) for start in zip(pending, budgets, noise, strict=True)]
        unroll(source if self.timer is None else timed(source, self.timer), slots, rules, self.marks)
        self._drafted = {slot: rule.drafted for slot, rule in zip(slots, rules, strict=True)}
        return [rule.growth.tree(source.name, rule.weights()) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            drafted = self._drafted.pop(slot, None)
            if drafted is not None and drafted.rows and record.tree.candidates == len(drafted.rows):
                self.stop.observe(drafted, len(record.verdict.path))


@dataclass(slots=True)
class _Path:
    growth: Growth
    options: Stopping
    drafted: Drafted = field(default_factory=Drafted)

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        (node,), (q,) = nodes, rows
        if node:
            self.drafted.chances.append(self.growth.chances.get(node, 1.0))
        if not (proposed := self._drawn(q, node)):
            return []
        self.drafted.rows.append(q)
        made = self.growth.propose(node, proposed)
        ended = self.growth.tokens[made[0]] in self.options.ends
        return made if not ended and self.options.stop.goes_on(self.drafted) else []

    def _drawn(self, q: QRow, node: int) -> DrawnTokens:
        noise = self.growth.noise
        if noise is None or not self.options.shared:
            return independent(q, 1, noise, node)
        first = cast(SharedNoise, noise).first(q.ids, q.probs, self.growth.path(node), 1)
        return [(int(q.ids[i]), None) for i in first]

    def weights(self) -> list[float]:
        """Chances down to each node; of a token that did not run, what the row it came from says of it."""
        weights = [1.0]
        for node, q in enumerate(self.drafted.rows, 1):
            weights.append(weights[-1] * self.growth.chances.get(node, q.prob(self.growth.tokens[node])))
        return weights
