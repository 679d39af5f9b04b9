"""Shared noise: proposes the tokens that would be sampled from the draft's distribution with the target's noise.

Under the drafter-invariant rule the target's token after each text is the winner of an exponential race (Gumbel-max
sampling) whose noise depends on the seed and the text alone. The draft runs the same race with its probabilities, so
where the two distributions are close the winners agree; the first few to arrive become children. Lossless with that
rule, which alone decides; every coupled rule refuses such a drafter. Without noise the likeliest tokens are taken. A
path less likely than `Budget.least` is not extended. Cost: one source call a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from outrider.core.protocols import Noise, SharedNoise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.drawing import likeliest
from outrider.grow.growth import Growth, unroll


@dataclass(frozen=True, slots=True)
class SharedRace:
    expansion: tuple[int, ...] = (1, 1, 1, 1)  # children at each depth

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [
            _Race(Growth(token, budget & Budget(budget.nodes, len(self.expansion)), slot_noise), self.expansion)
            for token, budget, slot_noise in zip(pending, budgets, noise, strict=True)
        ]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name, rule.chances) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Race:
    growth: Growth
    expansion: tuple[int, ...]
    chances: list[float] = field(default_factory=lambda: [1.0])  # per node: the draft's probability of its path

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        children: list[int] = []
        for node, q in zip(nodes, rows, strict=True):
            depth, noise = self.growth.depths[node], self.growth.noise
            count = min(self.expansion[depth], self.growth.room)
            if count < 1:
                break
            if noise is None:
                proposals = likeliest(q, count, noise, node)
            else:
                order = cast(SharedNoise, noise).first(q.ids, q.probs, self.growth.path(node), count)
                proposals = [(int(q.ids[i]), None) for i in order]
            children += self.growth.propose(node, proposals) if proposals else []
            self.chances += [self.chances[node] * q.prob(token) for token, _ in proposals]
        return [child for child in children if self.chances[child] >= self.growth.budget.least]
