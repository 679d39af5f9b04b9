"""Chain: one path, one source call a depth, over the whole batch at once.

Lossless: with noise each token is drawn from the source's law and carries its row; without, the likeliest token is
taken as a point mass. Cost: as many source calls as the deepest budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.grow.drawing import independent
from outrider.grow.growth import Growth, unroll
from outrider.protocols import Budget, Noise, Source, StepRecord
from outrider.tree import QRow, TokenTree


class Chain:
    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [_Path(Growth(*own)) for own in zip(pending, budgets, noise, strict=True)]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name) for rule in rules]

    def observe(self, slot: int, record: StepRecord) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Path:
    growth: Growth

    def expand(self, nodes: Sequence[int], laws: Sequence[QRow]) -> list[int]:
        (node,), (law,) = nodes, laws
        return self.growth.propose(node, independent(law, 1, self.growth.noise, node))
