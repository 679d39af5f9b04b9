"""A chain that ends with the first token its source was not sure of: what comes after a guess is rarely accepted.

Kangaroo (arXiv 2404.18911). Lossless: the stop looks at draft laws only, and the unsure token itself is still verified.
Cost: one source call a depth, fewer where the source doubts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.grow.drawing import independent
from outrider.grow.growth import Growth, unroll
from outrider.protocols import Budget, Noise, Source, StepRecord
from outrider.tree import QRow, TokenTree


@dataclass(slots=True)
class Confident:
    threshold: float = 0.6  # eta; 0 never stops, above 1 drafts one token

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = [_Path(Growth(*own), self.threshold) for own in zip(pending, budgets, noise, strict=True)]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name) for rule in rules]

    def observe(self, slot: int, record: StepRecord) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Path:
    growth: Growth
    threshold: float

    def expand(self, nodes: Sequence[int], laws: Sequence[QRow]) -> list[int]:
        (node,), (law,) = nodes, laws
        made = self.growth.propose(node, independent(law, 1, self.growth.noise, node))
        sure = len(law.probs) > 0 and float(law.probs.max()) >= self.threshold  # of its choice, not of what was drawn
        return made if sure else []
