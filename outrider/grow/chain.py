"""Chain: one path, one source call a depth, over the whole batch at once.

Lossless: with noise each token is drawn from the source's law and carries its row; without, the likeliest token is
taken as a point mass. Cost: as many source calls as the deepest budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.grow.drawing import independent
from outrider.grow.shape import fill, k_ary
from outrider.protocols import Budget, Noise, Source, StepRecord
from outrider.tree import TokenTree


class Chain:
    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        shapes = [k_ary((1,) * max(budget.nodes, 0), budget) for budget in budgets]
        return fill(shapes, independent, source, slots, pending, budgets, noise)

    def observe(self, slot: int, record: StepRecord) -> None:
        """Learns nothing."""
