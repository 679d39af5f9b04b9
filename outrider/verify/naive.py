"""Naive tree verification: one sampled draw a node is tested, the other candidates count only if the correction hits.

The first sampled draw x is kept with probability min(1, p(x)/q(x)); else a token comes from norm([p - q]+), and the
walk goes on if any child carries it. A yardstick for the rules that test every draw (as in arXiv 2305.09781).

Lossless where the first sampled draw was made from its own row without regard to the others: for all draws but point
masses ahead of rows that may hold them. Costs at most one rejection and one final draw a node.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, TokenTree
from outrider.verify.residual import accept_ratio, after_rejection
from outrider.verify.walk import follow, follow_draws, refuse_points_first


class Naive:
    name = "naive"
    honours = frozenset(Law) - {Law.OTHER}
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_points_first(tree)
        return follow_draws(tree, rows, noise, _choose)


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token distributed as p, the first sampled one where possible."""
    left = p
    for j, draw in enumerate(draws):
        if draw.row is None:
            continue
        if draw.token != NOTHING:
            accept = accept_ratio(p, 1.0, draw)
            if accept > 0.0 and noise.coin(accept, node, j):  # the first test: no coin may save a token with p = 0
                return draw.token
        left, _ = after_rejection(p, 1.0, draw.row)
        break
    return noise.draw(left, node, len(draws))
