"""Stopping: a chain that is asked after each token whether another one is worth drafting.

SpecDec++ (arXiv 2405.19715) ends a chain once it has probably been rejected already; other rules fit the same place.
Lossless: whether to go on is decided from tokens that stay in the chain. What a chain's marks say of a token is known
when the token has run, one token late: the one behind it is proposed by then, and costs nothing more. Cost: one source
call and one of the marks a depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from outrider.core.protocols import Marks, Noise, SharedNoise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.drawing import DrawnTokens, independent
from outrider.grow.growth import Growth, unroll


@dataclass(slots=True)
class Drafted:
    """What is known of a chain of k tokens: the row behind each, and the marks of all but the last."""

    rows: list[QRow] = field(default_factory=list)  # k
    chances: list[float] = field(default_factory=list)  # k - 1: that a token is accepted once the one before it is


class Stop(Protocol):
    """Whether a chain is long enough. Must not look at anything but the chain."""

    def goes_on(self, drafted: Drafted) -> bool: ...


@dataclass(frozen=True, slots=True)
class Doubt:
    """SpecDec++'s rule: no further once some token has been rejected with a chance above h."""

    threshold: float = 0.3  # h; 0: as short as may be, 1: as long
    least: int = 2  # tokens

    def goes_on(self, drafted: Drafted) -> bool:
        if len(drafted.rows) < self.least:
            return True
        return 1.0 - float(np.prod(drafted.chances)) <= self.threshold


@dataclass(frozen=True, slots=True)
class Stopping:
    stop: Stop
    marks: Marks | None = None
    ends: frozenset[int] = frozenset()  # tokens behind which there is no text
    shared: bool = False  # draws with the target's noise, for the rule that takes no other

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [_Path(Growth(*start), self) for start in zip(pending, budgets, noise, strict=True)]
        unroll(source, slots, rules, self.marks)
        return [rule.growth.tree(source.name, rule.weights()) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


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
