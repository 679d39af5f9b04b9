"""DySpec: always draws next where that is likeliest to add an accepted token, judged by the draft's probabilities.

arXiv 2410.11744. Lossless: a position is chosen by what has been drawn and by what is left of its row, never by the
token about to be drawn, and siblings are without replacement. Cost: `Heap` is the greedy form, with as many source
calls as nodes are expanded, for sources that cost little; `Threshold` draws at each depth while the rank is above a
threshold that follows the budget, best first, with one source call a level.

An open position is a node and what is left of its row; its value v estimates the chance that
verification comes there and finds all earlier siblings rejected. Drawing y from the rest R gives the next sibling the
value v (1 - a) and the first child of y the value v a, both at most v, where a is the chance that y is accepted. The
paper takes a = R(y) and draws at the largest v. By default here a is what has been seen of such draws, and positions
are ranked by v g, g being how often a draw at such a position was accepted: a second draw is accepted far less often
than a first, which v alone does not show.

Without noise the likeliest token is taken, and since it is known, positions are ranked by the chance v max R that it is
accepted: the tree of most accepted tokens if each draft is accepted with its draft probability, which ranking by v
alone does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import log2

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import NOTHING, Draw, QRow, TokenTree
from outrider.grow.drawing import DrawnTokens, proper, ranked, reduced
from outrider.grow.growth import Growth, unroll

RANKS, POWERS = 4, 16  # classes of draws: first, second, third, later; by powers of two of a probability
FIRST_GUESS = (0.5, 0.25, 0.15, 0.1)  # acceptance of a tested draw by rank, until it is seen


def _nothing() -> NDArray[np.float64]:
    return np.zeros((2, RANKS, POWERS))


@dataclass(slots=True)
class Calibration:
    """How often a tested draw was accepted: by its rank among siblings and its draft probability R, once it is known;
    by its rank and the largest R of its row, before.

    Under rejection a draw is accepted by min(1, p / q), which need not be small where q is: flat drafts, trusted by R
    alone, give trees that are all siblings. R itself counts until draws of its class have been seen.
    """

    weight: float = 8.0  # observations that a guess counts for
    keep: float = 0.998  # of a class's record, after each test of it
    _drawn: NDArray[np.float64] = field(default_factory=_nothing)  # [2, ranks, powers of R]: tested, accepted
    _asked: NDArray[np.float64] = field(default_factory=_nothing)  # the same by powers of max R
    _chances: list[list[tuple[float, float]]] = field(default_factory=list)  # a + b R; empty: to be made anew
    _gains: list[list[float]] = field(default_factory=list)  # the last of each is for rows that are not known

    def chance(self, share: float, rank: int = 0) -> float:
        """That a draw of probability `share` is accepted, if it is tested."""
        if not self._chances:
            self._settle()
        a, b = self._chances[min(rank, RANKS - 1)][_power(share)]
        return a + b * share

    def gain(self, rank: int, largest: float | None = None) -> float:
        """That the next draw of a node is accepted, if it is tested; `largest` is None while the row is unknown."""
        if not self._gains:
            self._settle()
        return self._gains[min(rank, RANKS - 1)][POWERS if largest is None else _power(largest)]

    def _settle(self) -> None:
        """A class leans on the draws of all ranks with its R, and they on R; or on all draws of its rank."""
        w, (tested, won) = self.weight, self._drawn
        pooled = won.sum(0) / (tested.sum(0) + w), w / (tested.sum(0) + w)
        terms = (won + w * pooled[0]) / (tested + w), w * pooled[1] / (tested + w)
        self._chances = np.stack(terms, axis=2).tolist()
        tested, won = self._asked
        mean = (won.sum(1) + w * np.array(FIRST_GUESS)) / (tested.sum(1) + w)
        self._gains = np.column_stack([(won + w * mean[:, None]) / (tested + w), mean]).tolist()

    def observe(self, record: StepRecord) -> None:
        """Changes state: the draws that were tested on the way, up to the accepted one at each node."""
        path = record.verdict.path
        for node, accepted in zip((0, *path), (*path, NOTHING), strict=True):
            for j, draw in enumerate(record.tree.draws[node]):
                if draw.row is not None:
                    rank, seen = min(j, RANKS - 1), (1.0, float(draw.child == accepted))
                    for table, share in ((self._drawn, draw.row.prob(draw.token)), (self._asked, draw.row.probs.max())):
                        cell = table[:, rank, _power(float(share))]
                        cell *= self.keep
                        cell += seen
                if draw.child == accepted:
                    break
        self._chances, self._gains = [], []


def _power(share: float) -> int:
    return min(int(-log2(share)), POWERS - 1) if share > 0.0 else POWERS - 1


@dataclass(frozen=True, slots=True)
class Heap:
    depth: int = 8
    calibration: Calibration | None = field(default_factory=Calibration)  # None: the paper's R and v

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = []
        for token, budget, slot_noise in zip(pending, budgets, noise, strict=True):
            rules.append(
                _BestFirst(Growth(token, budget & Budget(budget.nodes, self.depth), slot_noise), self.calibration)
            )
        unroll(source, slots, rules)
        return [rule.tree(source.name) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        if self.calibration is not None:
            for record in records:
                self.calibration.observe(record)


@dataclass(slots=True)
class Threshold:
    """`threshold` 0 lets it follow the budget: about as many positions are worth drawing as there are nodes."""

    depth: int = 8
    threshold: float = 0.0
    calibration: Calibration | None = field(default_factory=Calibration)  # None: the paper's R and v
    _learnt: dict[int, float] = field(default_factory=dict)  # nodes of the budget -> threshold

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        rules = []
        for token, budget, slot_noise in zip(pending, budgets, noise, strict=True):
            least = self.threshold or self._learnt.get(budget.nodes) or 1.0 / (budget.nodes + 1)
            growth = Growth(token, budget & Budget(budget.nodes, self.depth), slot_noise)
            rules.append(_ByLevel(growth, self.calibration, least=least))
        unroll(source, slots, rules)
        self._learn(rules)
        return [rule.tree(source.name) for rule in rules]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        if self.calibration is not None:
            for record in records:
                self.calibration.observe(record)

    def _learn(self, rules: Sequence[_ByLevel]) -> None:
        """Towards as many worthwhile positions as a budget has nodes, on average over the batch; for later steps."""
        for nodes in {rule.growth.budget.nodes for rule in rules} - {0}:
            alike = [rule for rule in rules if rule.growth.budget.nodes == nodes]
            found = sum(rule.worthwhile for rule in alike) / (nodes * len(alike))
            change = min(max(found**0.5, 0.5), 2.0)
            self._learnt[nodes] = min(max(alike[0].least * change, 1e-6), 0.5)


@dataclass(slots=True)
class _Urn:
    """What is left of one node's row."""

    row: QRow  # without noise: likeliest first
    weights: NDArray[np.float64]
    left: list[float]  # without noise: the sum of the weights before each draw
    total: float = 1.0  # with noise: the sum of the weights, and the largest of them
    largest: float = 1.0
    drawn: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Positions:
    """Open positions as a heap of (-rank, depth, age, node, value), and the urns of nodes whose row is known."""

    growth: Growth
    calibration: Calibration | None
    urns: dict[int, _Urn] = field(default_factory=dict)
    open: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    _age: int = 0

    def rank(self, value: float, node: int) -> float:
        """By which a position is chosen before anything is drawn there; its value while its row is unknown."""
        urn = self.urns.get(node)
        if self.growth.noise is not None:
            if self.calibration is None:
                return value
            if urn is None:
                return value * self.calibration.gain(0)
            return value * self.calibration.gain(len(urn.drawn), urn.largest / urn.total)
        if urn is None:
            return value
        j = len(urn.drawn)
        return value * float(urn.weights[j]) / urn.left[j] if j < len(urn.weights) else 0.0

    def push(self, value: float, node: int, least: float = 0.0) -> None:
        """Unless its rank is no more than `least`."""
        rank = self.rank(value, node)
        if rank > least:
            heappush(self.open, (-rank, self.growth.depths[node], self._age, node, value))
            self._age += 1

    def know(self, nodes: Sequence[int], rows: Sequence[QRow]) -> None:
        for node, q in zip(nodes, rows, strict=True):
            row, left = proper(q), list[float]()
            if self.growth.noise is None:
                order = ranked(row)
                row = QRow(row.ids[order], row.probs[order])
                left = row.probs[::-1].cumsum()[::-1][: self.growth.room + 1].tolist()
            self.urns[node] = _Urn(row, row.probs.copy(), left)
            if self.growth.noise is not None and len(row.ids):
                self.urns[node].largest = float(np.maximum.reduce(row.probs))

    def take(self) -> tuple[int, float, float]:
        """Draw at the best open position: the new child, its value and that of the next sibling."""
        _, _, _, node, value = heappop(self.open)
        urn, noise = self.urns[node], self.growth.noise
        j = len(urn.drawn)
        index = j if noise is None else noise.draw(urn.weights, node, j)
        drawn = float(urn.weights[index])
        share = drawn / (urn.left[j] if noise is None else urn.total)
        urn.weights[index] = 0.0
        if noise is not None:
            urn.total = float(np.add.reduce(urn.weights)) or 1.0
            if drawn >= urn.largest:
                urn.largest = float(np.maximum.reduce(urn.weights))
        urn.drawn.append(index)
        urn.children.append(self.growth.add(node, int(urn.row.ids[index])))
        chance = share if noise is None or self.calibration is None else self.calibration.chance(share, j)
        sibling = value * (1.0 - chance) if len(urn.drawn) < len(urn.weights) else 0.0
        return urn.children[-1], value * chance, sibling

    def tree(self, origin: str) -> TokenTree:
        for node, urn in self.urns.items():
            if self.growth.noise is None:
                made: DrawnTokens = [(self.growth.tokens[child], None) for child in urn.children]
            else:
                made = reduced(urn.row, urn.drawn)
            pairs = zip(made, urn.children, strict=True)
            self.growth.draws[node] = tuple(Draw(token, child, row) for (token, row), child in pairs)
        return self.growth.tree(origin)


@dataclass(slots=True)
class _BestFirst(_Positions):
    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        self.know(nodes, rows)
        for node in nodes:
            value = heappop(self.open)[4] if self.open else 1.0  # it asked for this row when it came up best
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

    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]:
        self.know(nodes, rows)
        for node in nodes:
            if len(self.urns[node].weights):
                self.push(self._values[node], node, self.least if node else 0.0)  # one draw at least
        self._values = {}
        while self.open and self.growth.room > 0:
            node = self.open[0][3]
            child, below, beside = self.take()
            self.worthwhile += 1
            self.push(beside, node, self.least)
            if self.rank(below, child) > self.least:
                self._values[child] = below
        self.worthwhile += len(self.open) + (len(self._values) if self.growth.room == 0 else 0)
        self.open.clear()
        return list(self._values)
