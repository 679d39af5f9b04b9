"""Recursive rejection for trees: test the sampled draws of a node in order, each against what earlier rejections left.

Draw j is kept with probability min(1, p_j(x)/q_j(x)); a rejection, or a draw that proposed nothing, leaves
p_{j+1} = norm([p_j - q_j]+). Then one token is drawn from what is left; if it has a child the walk goes on there, which
is all that point masses need: they were chosen, not sampled, so they are never tested. In SpecInfer (arXiv 2305.09781)
the rows are equal, in RSD and Sequoia (2402.14160, 2402.12374) each is the one before less its token.

Lossless whenever each sampled draw's row is its law given the draws before it: one row or several sources, with or
without replacement, repeated tokens, rows that sum below 1, drawn tokens that stand in no node. Point masses chosen
before a single sampled draw that excludes them are fine for the same reason; other point masses ahead of sampled draws
are refused, because nothing then shows that the row accounts for them. Costs a pass over the vocabulary for each
rejection and one for each final draw.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from outrider.errors import UnsupportedDraws
from outrider.protocols import Noise, Rows, Verdict
from outrider.tree import NOTHING, Draw, Law, TokenTree, law_of
from outrider.verify.residual import accept_ratio, after_rejection
from outrider.verify.walk import follow


class Recursive:
    name = "recursive"
    honours = frozenset(Law) - {Law.OTHER}
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        for node, draws in enumerate(tree.draws):
            # Only a point mass ahead of a sampled draw can make the law OTHER; naming the law of every node costs more.
            if len(draws) > 1 and _point_first(draws) and law_of(draws) is Law.OTHER:
                raise UnsupportedDraws(
                    f"node {node} has point masses ahead of sampled draws; put the sampled draws first, "
                    "or verify with the invariant rule"
                )
        return follow(tree, lambda node: _choose(rows.probs(node), tree.draws[node], node, noise))


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token of law p, a sampled one where possible."""
    left, mass = p, 1.0  # p_j = left / mass
    for j, draw in enumerate(draws):
        if draw.row is None:
            continue
        if draw.token != NOTHING:
            accept = accept_ratio(left, mass, draw)
            if accept > 0.0 and noise.coin(accept, node, j):  # the first test: no coin may save a token with p = 0
                return draw.token
        left, mass = after_rejection(left, mass, draw.row)
    return noise.draw(left, node, len(draws))


def _point_first(draws: tuple[Draw, ...]) -> bool:
    return any(a.row is None and b.row is not None for a, b in pairwise(draws))
