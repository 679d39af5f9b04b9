"""Acceptance by depth and rank: how often the k-th draw of a node was the accepted one, learnt from past steps.

a_k is the chance that verification, once at a node, goes on through its k-th draw: not the chance given that the draws
before it were rejected. Sums over k to at most 1. Used only to choose the next trees before they are drawn. Cost:
microseconds a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.records import StepRecord

PRIOR = (0.55, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)


@dataclass(slots=True)
class RankAcceptance:
    """Counts of offers and wins with a prior. A depth is judged by all depths together until it has its own record."""

    prior: Sequence[float] = PRIOR
    weight: float = 8.0  # observations that the prior counts for
    keep: float = 1.0  # how much of the record each step leaves: below 1 forgets
    depths: int = 16  # deeper nodes count as this deep
    steps: int = 0  # observed
    _offered: NDArray[np.float64] = field(init=False)  # [depths, ranks]
    _won: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._offered = np.zeros((self.depths, len(self.prior)))
        self._won = np.zeros_like(self._offered)

    def observe(self, record: StepRecord) -> None:
        """Changes state: the nodes that verification came to, and which of their draws it went on through."""
        tree, path = record.tree, record.verdict.path
        if not tree.candidates:
            return
        self.steps += 1
        if self.keep < 1.0:
            self._offered *= self.keep
            self._won *= self.keep
        for depth, node in enumerate((0, *path)):
            draws = tree.draws[node]
            at = min(depth, self.depths - 1)
            self._offered[at, : len(draws)] += 1
            if depth < len(path):
                rank = next((j for j, draw in enumerate(draws) if draw.child == path[depth]), len(self.prior))
                if rank < len(self.prior):
                    self._won[at, rank] += 1

    def by_rank(self) -> NDArray[np.float64]:
        """[ranks], all depths together."""
        prior = np.asarray(self.prior)
        return _one_at_most((self._won.sum(0) + self.weight * prior) / (self._offered.sum(0) + self.weight))

    def by_depth_and_rank(self) -> NDArray[np.float64]:
        """[depths, ranks]; row d is for the children of nodes at depth d."""
        return _one_at_most((self._won + self.weight * self.by_rank()) / (self._offered + self.weight))


def _one_at_most(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """One draw of a node is accepted at most: a rank that was seldom offered gets no more than earlier ones leave."""
    return np.diff(np.minimum(chances.cumsum(-1), 1.0), axis=-1, prepend=0.0)
