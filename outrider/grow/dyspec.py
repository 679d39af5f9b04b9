"""DySpec: always draw next where verification is likeliest to arrive, judged by the draft's own probabilities.

arXiv 2410.11744. An open position is a node and what is left of its row; its value v estimates the chance that
verification comes there and finds all earlier siblings rejected. Drawing y from the rest R gives the next sibling the
value v (1 - a) and the first child of y the value v a, both at most v. Here a is the chance that y is accepted: R(y) in
the paper; by default what has been seen of draws of such a probability, starting from R(y). Lossless: a position is
chosen by what has been drawn, never by the token about to be drawn, and siblings are without replacement.

Without noise the likeliest token is taken, and since it is known, positions are ranked by the chance v max R that it is
accepted: the tree of most accepted tokens if a draft is accepted with its own probability. Ranking by v alone is not.

`Heap` is the greedy form: as many source calls as nodes are expanded, for sources that cost little. `Threshold` draws
at each depth while v is above a threshold, best first: one source call a level. Its threshold follows the budget, from
past steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import log2

import numpy as np
from numpy.typing import NDArray

from outrider.grow.drawing import proper, ranked, reduced
from outrider.grow.growth import Growth, unroll
from outrider.protocols import Budget, Noise, Source, StepRecord
from outrider.tree import NOTHING, Draw, QRow, TokenTree


@dataclass(slots=True)
class Calibration:
    """How often a tested draw of draft probability R was accepted, by powers of two of R; R itself until it is seen.

    Under rejection a draw is accepted by min(1, p / q), which need not be small where q is: flat drafts, trusted by R
    alone, give trees that are all siblings.
    """

    weight: float = 8.0  # observations that R itself counts for
    keep: float = 0.998  # of the record, after each test
    _tested: list[float] = field(default_factory=lambda: [0.0] * 16)
    _won: list[float] = field(default_factory=lambda: [0.0] * 16)

    def chance(self, share: float) -> float:
        at = _power(share)
        return (self._won[at] + self.weight * share) / (self._tested[at] + self.weight)

    def observe(self, record: StepRecord) -> None:
        """Changes state: the draws that were tested on the way, up to the accepted one at each node."""
        path = record.verdict.path
        for node, accepted in zip((0, *path), (*path, NOTHING), strict=True):
            for draw in record.tree.draws[node]:
                if draw.row is not None:
                    at = _power(draw.row.prob(draw.token))
                    self._tested[at] = self._tested[at] * self.keep + 1.0
                    self._won[at] = self._won[at] * self.keep + (draw.child == accepted)
                if draw.child == accepted:
                    break


def _power(share: float) -> int:
    return min(int(-log2(share)), 15) if share > 0.0 else 15


@dataclass(frozen=True, slots=True)
class Heap:
    depth: int = 8
    calibration: Calibration | None = field(default_factory=Calibration)  # None: the paper's R

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = []
        for token, budget, own in zip(pending, budgets, noise, strict=True):
            rules.append(_BestFirst(Growth(token, budget & Budget(budget.nodes, self.depth), own), self.calibration))
        unroll(source, slots, rules)
        return [rule.tree(source.name) for rule in rules]

    def observe(self, slot: int, record: StepRecord) -> None:
        if self.calibration is not None:
            self.calibration.observe(record)


@dataclass(slots=True)
class Threshold:
    """`threshold` 0 lets it follow the budget: about as many positions are worth drawing as there are nodes."""

    depth: int = 8
    threshold: float = 0.0
    calibration: Calibration | None = field(default_factory=Calibration)  # None: the paper's R
    _learnt: dict[int, float] = field(default_factory=dict)  # nodes of the budget -> threshold

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = []
        for token, budget, own in zip(pending, budgets, noise, strict=True):
            least = self.threshold or self._learnt.get(budget.nodes) or 1.0 / (budget.nodes + 1)
            growth = Growth(token, budget & Budget(budget.nodes, self.depth), own)
            rules.append(_ByLevel(growth, self.calibration, least=least))
        unroll(source, slots, rules)
        for rule in rules:
            self._learn(rule)
        return [rule.tree(source.name) for rule in rules]

    def observe(self, slot: int, record: StepRecord) -> None:
        if self.calibration is not None:
            self.calibration.observe(record)

    def _learn(self, rule: _ByLevel) -> None:
        """Towards as many worthwhile positions as the budget has nodes; for the steps to come."""
        nodes = rule.growth.budget.nodes
        if nodes > 0:
            change = min(max((rule.worthwhile / nodes) ** 0.5, 0.5), 2.0)
            self._learnt[nodes] = min(max(rule.least * change, 1e-6), 0.5)


@dataclass(slots=True)
class _Urn:
    """What is left of one node's row."""

    row: QRow  # without noise: likeliest first
    weights: NDArray[np.float64]
    left: list[float]  # without noise: the sum of the weights before each draw
    drawn: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Positions:
    """Open positions as a heap of (-rank, depth, age, node, value), and the urns of nodes whose law is known."""

    growth: Growth
    calibration: Calibration | None
    urns: dict[int, _Urn] = field(default_factory=dict)
    open: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    _age: int = 0

    def rank(self, value: float, node: int) -> float:
        """What a position is worth before anything is drawn there; the value itself while its law is unknown."""
        if self.growth.noise is not None or node not in self.urns:
            return value
        urn = self.urns[node]
        j = len(urn.drawn)
        return value * float(urn.weights[j]) / urn.left[j] if j < len(urn.weights) else 0.0

    def push(self, value: float, node: int, least: float = 0.0) -> None:
        """Unless its rank is no more than `least`."""
        rank = self.rank(value, node)
        if rank > least:
            heappush(self.open, (-rank, self.growth.depths[node], self._age, node, value))
            self._age += 1

    def know(self, nodes: Sequence[int], laws: Sequence[QRow]) -> None:
        for node, law in zip(nodes, laws, strict=True):
            row, left = proper(law), list[float]()
            if self.growth.noise is None:
                order = ranked(row)
                row = QRow(row.ids[order], row.probs[order])
                left = row.probs[::-1].cumsum()[::-1][: self.growth.room + 1].tolist()
            self.urns[node] = _Urn(row, row.probs.copy(), left)

    def take(self) -> tuple[int, float, float]:
        """Draw at the best open position: the new child, its value and that of the next sibling."""
        _, _, _, node, value = heappop(self.open)
        urn, noise = self.urns[node], self.growth.noise
        j = len(urn.drawn)
        index = j if noise is None else noise.draw(urn.weights, node, j)
        share = float(urn.weights[index]) / (urn.left[j] if noise is None else float(np.add.reduce(urn.weights)))
        urn.weights[index] = 0.0
        urn.drawn.append(index)
        urn.children.append(self.growth.add(node, int(urn.row.ids[index])))
        chance = share if noise is None or self.calibration is None else self.calibration.chance(share)
        sibling = value * (1.0 - chance) if len(urn.drawn) < len(urn.weights) else 0.0
        return urn.children[-1], value * chance, sibling

    def tree(self, origin: str) -> TokenTree:
        for node, urn in self.urns.items():
            made = zip(reduced(urn.row, urn.drawn), urn.children, strict=True)
            point = self.growth.noise is None
            self.growth.draws[node] = tuple(Draw(token, child, None if point else row) for (token, row), child in made)
        return self.growth.tree(origin)


@dataclass(slots=True)
class _BestFirst(_Positions):
    def expand(self, nodes: Sequence[int], laws: Sequence[QRow]) -> list[int]:
        self.know(nodes, laws)
        for node in nodes:
            value = heappop(self.open)[4] if self.open else 1.0  # it asked for this law when it came up best
            if len(self.urns[node].weights):
                self.push(value, node)
        while self.open and self.growth.room > 0:
            node = self.open[0][3]
            if node not in self.urns:
                return [node]
            child, below, beside = self.take()
            self.push(beside, node)
            if self.growth.may_expand(child):
                self.push(below, child)
        return []


@dataclass(slots=True)
class _ByLevel(_Positions):
    least: float = 0.0
    worthwhile: int = 0  # positions above the threshold, drawn or not
    _values: dict[int, float] = field(default_factory=lambda: {0: 1.0})  # of the first child of each node of the level

    def expand(self, nodes: Sequence[int], laws: Sequence[QRow]) -> list[int]:
        self.know(nodes, laws)
        for node in nodes:
            if len(self.urns[node].weights):
                self.push(self._values[node], node, self.least)
        self._values = {}
        while self.open and self.growth.room > 0:
            node = self.open[0][3]
            child, below, beside = self.take()
            self.worthwhile += 1
            self.push(beside, node, self.least)
            if below > self.least:
                self._values[child] = below
        self.worthwhile += len(self.open) + (len(self._values) if self.growth.room == 0 else 0)
        self.open.clear()
        return list(self._values)
