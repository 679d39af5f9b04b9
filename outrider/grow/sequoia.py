"""Sequoia: the fixed tree of most expected tokens for a number of nodes and a depth, by dynamic programming.

arXiv 2402.12374. If the k-th draw of a node is the accepted one with probability a_k wherever the node stands, a tree
is worth the sum over its nodes of the product of a along the path. The vector a is learnt from past steps, starting
from a given one. Lossless: the form is fixed before drawing, siblings are drawn without replacement and drawing ends
where the source's row does. Cost: one source call a level; the programme runs now and then, in about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import TokenTree
from outrider.grow.acceptance import RankAcceptance
from outrider.grow.drawing import without_replacement
from outrider.grow.shape import Shape, fill


@dataclass(slots=True)
class Sequoia:
    """`refresh`: steps after which the vector follows what was learnt; 0 keeps the first one for ever."""

    acceptance: RankAcceptance = field(default_factory=RankAcceptance)
    depth: int = 8
    refresh: int = 64
    _vector: NDArray[np.float64] = field(init=False)  # what shapes are made from until the next refresh
    _shapes: dict[Budget, Shape] = field(default_factory=dict)
    _looked_at: int = 0

    def __post_init__(self) -> None:
        self._vector = self.acceptance.by_rank()

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        if self.refresh and self.acceptance.steps >= self._looked_at + self.refresh:
            self._vector, self._looked_at = self.acceptance.by_rank(), self.acceptance.steps
            self._shapes.clear()
        shapes = [self._shape(budget & Budget(budget.nodes, self.depth)) for budget in budgets]
        return fill(shapes, without_replacement, source, slots, pending, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for record in records:
            self.acceptance.observe(record)

    def _shape(self, budget: Budget) -> Shape:
        if budget not in self._shapes:
            self._shapes[budget] = best_shape(self._vector, budget)[0]
        return self._shapes[budget]


def best_shape(acceptance: Sequence[float] | NDArray[np.float64], budget: Budget) -> tuple[Shape, float]:
    """The best tree of exactly `budget.nodes` candidates (fewer where no more fit the depth and the ranks), and the
    expected tokens of a step with it, the target's own included.

    best[d][m]: most tokens below and at a node with m - 1 nodes under it on at most d levels. With b draws the last
    takes some of them: G_b[m] = max over y of G_{b-1}[y] + a_b best[d - 1][m - y].
    """
    size, levels = max(budget.nodes, 0) + 1, max(min(budget.depth, budget.nodes), 0)
    single = np.full(size + 1, -np.inf)
    single[1] = 1.0
    rest = np.arange(size + 1)[:, None] - np.arange(size + 1)[None, :]  # [m, y]: what y leaves of m
    best, splits, widths = [single], [], []
    for _ in range(levels):
        below = np.where(rest > 0, best[-1][np.maximum(rest, 0)], -np.inf)  # [m, y]
        possible = np.isfinite(below)
        below[~possible] = 0.0
        exact = [single]  # exact[b][m]
        split = []
        for a in acceptance:
            options = np.where(possible, exact[-1] + a * below, -np.inf)
            split.append(options.argmax(1))
            exact.append(options.max(1))
        every = np.stack(exact)
        best.append(every.max(0))
        widths.append(every.argmax(0))
        splits.append(split)
    size = int(np.nonzero(np.isfinite(best[-1]))[0][-1])  # a narrow vector or a shallow tree may hold fewer
    parents: list[int] = []
    level = [(0, size)]  # (node, how many stand at and below it)
    for left in range(levels, 0, -1):
        new = []
        for node, count in level:
            shares = []
            for b in range(int(widths[left - 1][count]), 0, -1):
                y = int(splits[left - 1][b - 1][count])
                shares.append(count - y)
                count = y
            for share in reversed(shares):
                parents.append(node)
                new.append((len(parents), share))
        level = new
    return Shape(tuple(parents)), float(best[-1][size])
