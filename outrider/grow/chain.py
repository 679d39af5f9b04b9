"""Chain: one path a sequence, grown a token at a time for the whole batch at once.

The drafts of speculative decoding as first published (arXiv 2211.17192, 2302.01318). Lossless: with noise each token is
drawn from the source's distribution and carries that row; without, the likeliest token is taken as a point mass. Cost:
as many source calls as the deepest budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.drawing import independent
from outrider.grow.growth import Growth, unroll


class Chain:
    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [_Path(Growth(*start)) for start in zip(pending, budgets, noise, strict=True)]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Path:
    growth: Growth

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        (node,), (q,) = nodes, rows
        return self.growth.propose(node, independent(q, 1, self.growth.noise, node))
