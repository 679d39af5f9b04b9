"""Top-k, re-ranked: grow the likeliest nodes level by level, then keep those of largest cumulative probability.

The dynamic tree of EAGLE-2 (arXiv 2406.16858). Point masses only, with noise or without, because re-ranking looks at
the candidates: lossless with every rule that honours fixed draws. A node's value is the product of draft probabilities
on its path, which never rises along a path, so the kept set is connected. Cost: one source call a level, at most `beam`
rows each; a node that is not among the best so far, or less likely than `Budget.least`, is not expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree, fixed
from outrider.grow.drawing import ranked
from outrider.grow.growth import Growth, unroll


@dataclass(frozen=True, slots=True)
class TopK:
    beam: int = 10  # nodes expanded at each depth
    branch: int = 10  # children of each
    depth: int = 6

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = []
        for token, budget in zip(pending, budgets, strict=True):
            limit = budget & Budget(budget.nodes, self.depth)
            looked_at = limit.nodes * (limit.depth + 1)  # at most `nodes` at each level; the best of all are kept
            rules.append(_Ranked(Growth(token, Budget(looked_at, limit.depth), None), limit.nodes, limit.least, self))
        unroll(source, slots, rules)
        return [rule.tree(source.name) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Ranked:
    growth: Growth
    keep: int
    least: float
    options: TopK
    _values: list[float] = field(default_factory=lambda: [1.0])  # per node

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        tokens, parents, values = [], [], []
        for node, q in zip(nodes, rows, strict=True):
            order = ranked(q)[: min(self.options.branch, self.keep)]
            tokens.append(q.ids[order])
            values.append(q.probs[order] * self._values[node])
            parents.append(np.full(len(order), node))
        flat = np.concatenate(values)
        least = sorted(self._values, reverse=True)[self.keep] if len(self._values) > self.keep else -1.0
        best = np.argsort(-flat, kind="stable")[: self.keep]
        best = best[flat[best] > least]  # the rest cannot be among the kept, nor can anything below it
        first = len(self._values)
        every = zip(*(np.concatenate(part)[best].tolist() for part in (parents, tokens)), strict=True)
        for parent, token in every:
            self.growth.add(parent, token)
        self._values += flat[best].tolist()
        fresh = range(first, min(len(self._values), first + self.options.beam))
        # once the tree is full a child must push out the last of it, and it is no likelier than its parent
        last = sorted(self._values, reverse=True)[self.keep] if len(self._values) > self.keep else -1.0
        return [node for node in fresh if self._values[node] > last and self._values[node] >= self.least]

    def tree(self, origin: str) -> TokenTree:
        order = sorted(range(1, len(self._values)), key=lambda node: -self._values[node])  # of equals, the parent
        kept = [0, *sorted(order[: self.keep])]
        place = {node: i for i, node in enumerate(kept)}
        parents = [place.get(self.growth.parents[node], -1) for node in kept]
        tokens = np.array([self.growth.tokens[node] for node in kept])
        return fixed(tokens, np.array(parents), origin, np.array([self._values[node] for node in kept]))
