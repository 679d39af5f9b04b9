"""Standard rejection for chains: keep the draft x with probability min(1, p(x)/q(x)), else correct from norm([p - q]+).

Speculative decoding's first rule (arXiv 2211.17192, 2302.01318). Lossless with at most one draw a node, sampled or a
point mass; a tree with more is refused, since several tries need the recursive rule. Costs one or two passes over the
vocabulary for each token emitted.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, TokenTree
from outrider.verify.residual import accept_ratio, after_rejection
from outrider.verify.walk import follow, follow_draws, refuse_several


class Rejection:
    name = "rejection"
    honours = frozenset({Law.NONE, Law.FIXED, Law.IID})
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_several(tree, "the rejection rule tests one draw a node", "the recursive or invariant rule")
        return follow_draws(tree, rows, noise, _choose)


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token distributed as p, the drawn one where possible."""
    if not draws or (row := draws[0].row) is None:
        return noise.draw(p, node, len(draws))  # nothing to be coupled to: a point mass is followed if it comes up
    if draws[0].token != NOTHING:
        accept = accept_ratio(p, 1.0, draws[0])
        if accept > 0.0 and noise.coin(accept, node, 0):  # the first test: no coin may save a token with p = 0
            return draws[0].token
    left, _ = after_rejection(p, 1.0, row)
    return noise.draw(left, node, 1)
