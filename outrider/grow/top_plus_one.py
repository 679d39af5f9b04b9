"""Top plus one: at every node the k - 1 likeliest tokens as point masses and one draw from the rest of the row.

Greedy draft sampling of the optimal multi-draft paper (arXiv 2502.18779): for these drafts ordinary rejection of the
one sampled token reaches the optimal acceptance. Lossless: the top tokens are chosen by the row alone, never with
knowledge of the sampled one. Cost: one source call a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import TokenTree
from outrider.grow.drawing import top_plus_one
from outrider.grow.shape import fill, k_ary


@dataclass(frozen=True, slots=True)
class TopPlusOne:
    expansion: tuple[int, ...] = (4, 2, 1, 1)  # k at each depth; with k = 1 the one child is sampled

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        shapes = [k_ary(self.expansion, budget) for budget in budgets]
        return fill(shapes, top_plus_one, source, slots, pending, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""
