"""RSD: siblings without replacement, with constant branching (RSD-C) or by stochastic beam search (RSD-S).

arXiv 2402.14160. Both lossless with recursive rejection: each draw carries the row it was drawn from, the source's row
less the siblings before it. Cost: one source call a level, for RSD-S of W rows each. RSD-C is Gumbel-top-k, that is,
sampling without replacement one by one.

RSD-S keeps at each depth the first W distinct prefixes of whole continuations that arrive in an exponential race, a
continuation at the rate of its draft probability. Exponential waiting times have no memory, so the race needs no times:
the next prefix below the beam is a new child x of a parent s that has a child already, with weight P(s) q(x | s), or
the first child of the next parent in line, with as weight all that has not arrived at the parents' depth, P(not yet
arrived) q(x | s). One draw decides parent and token together, and the token given its parent is distributed as the
reduced row says: whether a parent gets another child never depends on that child. The same distribution as that of
perturbing log-probabilities by Gumbel noise, with finitely many outcomes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.drawing import proper, reduced, without_replacement
from outrider.grow.growth import Growth, unroll
from outrider.grow.shape import fill, k_ary


@dataclass(frozen=True, slots=True)
class ConstantBranching:
    """RSD-C: every node at depth d has `branching[d]` children."""

    branching: tuple[int, ...] = (4, 2, 1, 1)

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        shapes = [k_ary(self.branching, budget) for budget in budgets]
        return fill(shapes, without_replacement, source, slots, pending, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class StochasticBeam:
    """RSD-S: at most `width` nodes at each depth; without noise, ordinary beam search."""

    width: int = 4
    depth: int = 8

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        limit = Budget(self.width * self.depth, self.depth)
        each = zip(pending, budgets, noise, strict=True)
        rules = [_Beam(Growth(token, budget & limit, slot_noise), self.width) for token, budget, slot_noise in each]
        unroll(source, slots, rules)
        return [rule.growth.tree(source.name) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Beam:
    growth: Growth
    width: int
    _chances: dict[int, float] = field(default_factory=lambda: {0: 1.0})  # the beam, in order of arrival: P(path)
    _outside: float = 0.0  # probability of all that is as deep as the beam and not in it

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        scaled, noise = [proper(row) for row in rows], self.growth.noise
        chances = [self._chances[node] for node in nodes]
        sizes = [len(row.ids) for row in scaled]
        starts = [*accumulate(sizes, initial=0)]
        flat = np.concatenate([row.probs for row in scaled])
        count = min(self.width, self.growth.room)
        if noise is None:
            best = np.argsort(-flat * np.repeat(chances, sizes), kind="stable")[:count].tolist()
        else:
            best = self._race(flat, sizes, starts, chances, count, noise, nodes[0])
        drawn: list[list[int]] = [[] for _ in scaled]
        places = []
        for index in best:
            s = bisect_right(starts, index) - 1
            places.append((s, len(drawn[s])))
            drawn[s].append(index - starts[s])
        children = []
        for node, row, picked in zip(nodes, scaled, drawn, strict=True):
            proposals = [(int(row.ids[i]), None) for i in picked] if noise is None else reduced(row, picked)
            children.append(self.growth.propose(node, proposals) if picked else [])
        self._chances = {  # never 0, so that a deep path of small probabilities still has a weight
            children[s][j]: max(chances[s] * float(flat[index]), 1e-250)
            for (s, j), index in zip(places, best, strict=True)
        }
        return list(self._chances)

    def _race(
        self, flat: NDArray[np.float64], sizes: list[int], starts: list[int], chances: list[float], count: int,
        noise: Noise, key: int,
    ) -> list[int]:  # fmt: skip
        """The first arrivals below the beam, in order, as indices into the parents' rows laid end to end."""
        late = [*accumulate(chances[::-1], initial=self._outside)][::-1]  # what arrives with parent s or after it
        later, weights = flat * np.repeat((chances, late[:-1]), sizes, axis=1)  # a parent's later children; its first
        line, arrivals = 0, list[int]()  # the parent whose first child is awaited: those after it have none before
        while line < len(sizes) and not sizes[line]:  # an empty row: no child will come
            line += 1
        end = starts[min(line + 1, len(sizes))]
        while len(arrivals) < min(count, end):
            index = noise.draw(weights[:end], key, len(arrivals))
            arrivals.append(index)
            if line < len(sizes) and index >= starts[line]:  # its first child: the others come at the parent's rate
                weights[starts[line] : end] = later[starts[line] : end]
                line += 1
                while line < len(sizes) and not sizes[line]:
                    line += 1
                end = starts[min(line + 1, len(sizes))]
            weights[index] = 0.0
        self._outside = late[line] + float(np.add.reduce(weights[: starts[line]]))
        return arrivals
