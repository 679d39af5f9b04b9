"""Best-first: of a source that gives all its distributions at once, the candidates of largest product of chances.

The trees that DDTree grows from a block drafter's marginals. Lossless: point masses only, with noise or without. The
products are those of independent depths, which is what such a source says; the tree is the one of most expected
accepted tokens if it is right. Cost: one source call, then a heap on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from outrider.core.protocols import Noise, Source, WholeSource
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree, fixed, root
from outrider.grow.drawing import ranked
from outrider.grow.products import likeliest_paths


@dataclass(frozen=True, slots=True)
class BestFirst:
    depth: int = 16

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        trees = [root(token) for token in pending]
        asked = [i for i, budget in enumerate(budgets) if budget]
        if not asked:
            return trees
        found = cast(WholeSource, source).marginals([slots[i] for i in asked])
        for i, rows in zip(asked, found, strict=True):
            if rows:
                trees[i] = best_tree(pending[i], rows, budgets[i] & Budget(budgets[i].nodes, self.depth), source.name)
        return trees

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


def best_tree(pending: int, rows: Sequence[QRow], limit: Budget, origin: str = "") -> TokenTree:
    """The candidates of largest product, parents first; a row a depth, of which there is one."""
    depth = min(limit.depth, len(rows))
    orders = [ranked(row)[: limit.nodes] for row in rows[:depth]]
    table = [row.probs[order].tolist() for row, order in zip(rows, orders, strict=False)]
    nodes = likeliest_paths(table, limit.nodes, depth)
    said = [row.ids[order].tolist() for row, order in zip(rows, orders, strict=False)]
    tokens = np.array([pending, *(said[level - 1][rank] for _, level, rank, _ in nodes)], dtype=np.int64)
    parents = np.array([-1, *(parent for parent, _, _, _ in nodes)], dtype=np.int64)
    return fixed(tokens, parents, origin, np.array([1.0, *(value for _, _, _, value in nodes)]))
