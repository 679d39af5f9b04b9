"""Fixed k-ary tree: every node at depth d makes `expansion[d]` draws, for instance (4, 2, 1, 1).

Lossless: independent draws (SpecInfer, arXiv 2305.09781), draws without replacement, or the top tokens as point masses;
the form is fixed before drawing. Cost: one source call a level; 28 nodes for (4, 2, 1, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import TokenTree
from outrider.grow.drawing import Drawing, independent, likeliest, without_replacement
from outrider.grow.shape import fill, k_ary

DRAWINGS: dict[str, Drawing] = {
    "iid": independent,
    "without-replacement": without_replacement,
    "top": likeliest,
}


@dataclass(frozen=True, slots=True)
class KAry:
    expansion: tuple[int, ...] = (4, 2, 1, 1)
    drawing: str = "iid"  # one of DRAWINGS

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        shapes = [k_ary(self.expansion, budget) for budget in budgets]
        return fill(shapes, DRAWINGS[self.drawing], source, slots, pending, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""
