"""Confident: a chain that ends with the first token its source was not sure of.

What comes after an unsure token is rarely accepted. Kangaroo (arXiv 2404.18911). Lossless: whether to stop follows from
the source's distribution, not from what was drawn, and the unsure token itself is still verified. Cost: one source call
a depth, fewer where the source is unsure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.drawing import independent
from outrider.grow.growth import Growth, unroll


@dataclass(slots=True)
class Confident:
    threshold: float = 0.6  # eta; 0 never stops, above 1 drafts one token

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [_Path(Growth(*start), self.threshold) for start in zip(pending, budgets, noise, strict=True)]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Path:
    growth: Growth
    threshold: float

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        (node,), (q,) = nodes, rows
        made = self.growth.propose(node, independent(q, 1, self.growth.noise, node))
        sure = len(q.probs) > 0 and float(q.probs.max()) >= self.threshold  # of its choice, not of what was drawn
        return made if sure else []
