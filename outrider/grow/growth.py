"""Growth: one slot's tree while it grows, and the loop that unrolls a source level by level over the whole batch.

A grower supplies a *rule* a slot; the loop asks the source for the rows that the rules wait for, all slots in one call,
and enforces the budgets. The source is shown only the nodes it was asked to run, so leaves cost it nothing, and no
draws. Where there are marks, the nodes that ran carry them. Draws nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.likeliest import NO_ROW
from outrider.core.protocols import Marks, Noise, Source
from outrider.core.records import Budget
from outrider.core.tree import Draw, QRow, TokenTree


@dataclass(slots=True)
class Growth:
    """Nodes in the order they are made, parents before children; node 0 is the pending token."""

    pending: int
    budget: Budget
    noise: Noise | None  # None: nothing is drawn
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    draws: list[tuple[Draw, ...]] = field(default_factory=list)
    chances: dict[int, float] = field(default_factory=dict)  # of nodes that ran: their marks, where there are any
    _place: dict[int, int] = field(default_factory=lambda: {0: 0})  # node -> its number in the tree the source runs
    _run: NDArray[np.int64] = field(init=False)  # that tree: tokens, parents and depths, as far as `_place` goes

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.depths, self.draws = [self.pending], [-1], [0], [()]
        self._run = np.empty((3, max(self.budget.nodes, 0) + 1), dtype=np.int64)
        self._run[:, 0] = self.pending, -1, 0

    @property
    def room(self) -> int:
        """Candidates that may still be added."""
        return self.budget.nodes + 1 - len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.draws.append(())
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Tokens from the first candidate down to `node`."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def may_expand(self, node: int) -> bool:
        return self.room > 0 and self.depths[node] < self.budget.depth

    def propose(self, node: int, proposals: Sequence[tuple[int, QRow | None]]) -> list[int]:
        """Make these the draws of `node`, in order; equal tokens share a child. The child of each draw."""
        if len(proposals) == 1:  # most nodes
            token, row = proposals[0]
            child = self.add(node, token)
            self.draws[node] = (Draw(token, child, row),)
            return [child]
        children: dict[int, int] = {}
        for token, _ in proposals:
            if token not in children:
                children[token] = self.add(node, token)
        self.draws[node] = tuple(Draw(token, children[token], row) for token, row in proposals)
        return [children[token] for token, _ in proposals]

    def running(self, nodes: Sequence[int]) -> tuple[TokenTree, int]:
        """The nodes that the source has run, then these; and how many it has run."""
        run, place = self._run, self._place
        done = len(place)
        for at, node in enumerate(nodes, done):
            place[node] = at
            run[0, at], run[1, at], run[2, at] = self.tokens[node], place[self.parents[node]], self.depths[node]
        return _known_tree(run[:, : len(place)]), done

    def tree(self, origin: str, weights: Sequence[float] | None = None) -> TokenTree:
        """`weights`: of each node, the guess that the path down to it is accepted."""
        origins = ("",) + (origin,) * (len(self.tokens) - 1)
        guesses = None if weights is None else np.array(weights)
        return TokenTree(np.array(self.tokens), np.array(self.parents), tuple(self.draws), origins, guesses)


def _known_tree(run: NDArray[np.int64]) -> TokenTree:
    """A tree without draws from rows known to fit: checking and counting depths anew at every level would cost more
    than drawing does."""
    tree = object.__new__(TokenTree)
    values = (run[0], run[1], ((),) * run.shape[1], (), None, run[2])
    for name, value in zip(("tokens", "parents", "draws", "origins", "weights", "depths"), values, strict=True):
        object.__setattr__(tree, name, value)
    return tree


class Rule(Protocol):
    """How one slot's tree grows in this step."""

    @property
    def growth(self) -> Growth: ...
    def expand(self, nodes: Sequence[int], rows: Sequence[QRow]) -> list[int]: ...  # the nodes whose rows it wants next


def unroll(source: Source, slots: Sequence[int], rules: Sequence[Rule], marks: Marks | None = None) -> None:
    """Grow every slot's tree until no rule wants another row or its budget is spent.

    A source with the hint `marginals` (`WholeSource`) is asked once for all.
    """
    waiting = {i: [0] for i, rule in enumerate(rules) if rule.growth.may_expand(0)}
    if waiting and (marginals := getattr(source, "marginals", None)) is not None:
        for i, rows in zip(waiting, marginals([slots[i] for i in waiting]), strict=True):
            _by_depth(rules[i], rows)
        return
    found = [[row] for row in source.start([slots[i] for i in waiting])] if waiting else []
    while waiting:
        wanted: dict[int, list[int]] = {}
        for (i, nodes), rows in zip(waiting.items(), found, strict=True):
            growth = rules[i].growth
            if new := [node for node in rules[i].expand(nodes, rows) if growth.may_expand(node)]:
                wanted[i] = new
        waiting = wanted
        if waiting:
            trees, done = zip(*(rules[i].growth.running(nodes) for i, nodes in waiting.items()), strict=True)
            running = [slots[i] for i in waiting]
            found = source.extend(running, trees, done)
            if marks is not None:
                every = marks.chances(running, trees, done)
                for (i, nodes), chances in zip(waiting.items(), every, strict=True):
                    rules[i].growth.chances.update(zip(nodes, chances.tolist(), strict=False))


def _by_depth(rule: Rule, rows: Sequence[QRow]) -> None:
    """Grow a tree from the distributions at each depth; below the last nothing is proposed."""
    growth, nodes = rule.growth, [0]
    while nodes:
        depths = (growth.depths[node] for node in nodes)
        found = [rows[depth] if depth < len(rows) else NO_ROW for depth in depths]
        nodes = [node for node in rule.expand(nodes, found) if growth.may_expand(node)]
