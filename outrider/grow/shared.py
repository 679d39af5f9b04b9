"""Shared noise: candidates in the order in which they would win under the draft's law with the target's own noise.

Behind each text the target's token is the winner of a race whose noise depends on the seed and the text alone. The
draft runs the same race with its own law, so where the laws are close the winners agree; the first few to arrive become
children. Lossless with the drafter-invariant rule, which alone decides; every coupled rule refuses such a drafter.
Without noise the likeliest tokens are taken. A path less likely than the budget says is worth a level is not extended.
Cost: one source call a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from outrider.grow.drawing import likeliest
from outrider.grow.growth import Growth, unroll
from outrider.protocols import Budget, Noise, SharedNoise, Source, StepRecord
from outrider.tree import QRow, TokenTree


@dataclass(frozen=True, slots=True)
class SharedRace:
    expansion: tuple[int, ...] = (1, 1, 1, 1)  # children at each depth

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [
            _Race(Growth(token, budget & Budget(budget.nodes, len(self.expansion)), own), self.expansion)
            for token, budget, own in zip(pending, budgets, noise, strict=True)
        ]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name, rule.chances) for rule in rules]

    def observe(self, slot: int, record: StepRecord) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Race:
    growth: Growth
    expansion: tuple[int, ...]
    chances: list[float] = field(default_factory=lambda: [1.0])  # per node: the draft's, down to it

    def expand(self, nodes: Sequence[int], laws: Sequence[QRow]) -> list[int]:
        children: list[int] = []
        for node, law in zip(nodes, laws, strict=True):
            depth, noise = self.growth.depths[node], self.growth.noise
            count = min(self.expansion[depth], self.growth.room)
            if count < 1:
                break
            if noise is None:
                proposals = likeliest(law, count, noise, node)
            else:
                order = cast(SharedNoise, noise).first(law.ids, law.probs, self.growth.path(node), count)
                proposals = [(int(law.ids[i]), None) for i in order]
            children += self.growth.propose(node, proposals) if proposals else []
            self.chances += [self.chances[node] * law.prob(token) for token, _ in proposals]
        return [child for child in children if self.chances[child] >= self.growth.budget.least]
