"""Traversal verification for trees: from the leaves to the root, with weights of whole sequences (arXiv 2505.12398).

A node is entered with a weight a, the share of the target's probability below it that is still to be emitted there.
Each child x is entered with min(1, a P(x)/Q(x)); if nothing below it is kept, S = sum [a P - Q]+ gives the node's new
weight S / (S + 1 - a) and residual norm([a P - Q]+). When all draws have failed the node itself is kept with its
weight, and the next token comes from its residual. Keeping a node keeps its path. On a chain this is block
verification.

Lossless whenever each sampled draw's row is its distribution given the draws before it, as for the recursive rule: with
or without replacement, several sources, repeated tokens, rows that sum below 1. Point masses are tested after the
sampled draws, as the one-token rows that they are; point masses ahead of sampled draws whose rows may hold them are
refused. Needs the target's row at every node entered and costs a pass over the vocabulary for each draw that fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, TokenTree
from outrider.verify.residual import accept_ratio, after_rejection, point
from outrider.verify.walk import follow, refuse_points_first


class Traversal:
    name = "traversal"
    honours = frozenset(Law) - {Law.OTHER}
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_points_first(tree)
        verdict = _Walk(tree, rows, noise).visit(0, 1.0)
        assert verdict is not None, "node 0 keeps its weight of 1"
        return verdict


@dataclass(frozen=True, slots=True)
class _Walk:
    tree: TokenTree
    rows: Rows
    noise: Noise

    def visit(self, node: int, a: float) -> Verdict | None:
        """What is kept at `node` or below it; None where everything failed."""
        draws = self.tree.draws[node]
        left, mass = (self.rows.probs(node) if draws else None), 1.0  # P = left / mass; a leaf's row waits
        entered: set[int] = set()  # a child that failed has nothing left to say, however often it was drawn
        for j, draw in _in_order(draws):
            assert left is not None and draw.row is not None
            if draw.token != NOTHING and draw.child not in entered:
                kept = self._below(node, j, draw, accept_ratio(left, mass / a, draw))
                if kept is not None:
                    return kept
                entered |= {draw.child} - {NOTHING}
            rest, total = after_rejection(left, mass / a, draw.row)
            if rest is not left:
                said = a * total / mass  # S
                a, left, mass = said / (said + (1.0 - a)), rest, total
            elif a < 1.0:
                return None  # all of the node's share was said below; at weight 1 only rounding can say so
        if node == 0 or self.noise.coin(a, node, len(draws)):
            weights = self.rows.probs(node) if left is None else left
            return self._ends(node, self.noise.draw(weights, node, len(draws) + 1))
        return None

    def _below(self, node: int, j: int, draw: Draw, weight: float) -> Verdict | None:
        if weight == 0.0:
            return None
        if draw.child != NOTHING:
            return self.visit(draw.child, weight)
        # The token stands in no node: kept, it is the next token itself.
        return self._ends(node, draw.token) if self.noise.coin(weight, node, j) else None

    def _ends(self, node: int, token: int) -> Verdict:
        return Verdict(tuple(self.tree.path(node)), token)


def _in_order(draws: tuple[Draw, ...]) -> list[tuple[int, Draw]]:
    """Sampled draws, then point masses that have a node, as rows of one token; each with its place among the draws."""
    sampled = [(j, draw) for j, draw in enumerate(draws) if draw.row is not None]
    points = [(j, draw) for j, draw in enumerate(draws) if draw.row is None and draw.child != NOTHING]
    return sampled + [(j, Draw(draw.token, draw.child, point(draw.token))) for j, draw in points]
