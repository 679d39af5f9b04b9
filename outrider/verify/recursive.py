"""Recursive rejection for trees: test the sampled draws of a node in order, each against what earlier rejections left.

Draw j is kept with probability min(1, p_j(x)/q_j(x)); a rejection, or a draw that proposed nothing, leaves
p_{j+1} = norm([p_j - q_j]+). Then one token is drawn from what is left; if it has a child the walk goes on there, which
is all that point masses need: they were chosen, not sampled, so they are never tested. In SpecInfer (arXiv 2305.09781)
the rows are equal, in RSD and Sequoia (2402.14160, 2402.12374) each is the one before less its token.

Lossless whenever each sampled draw's row is its distribution given the draws before it: one row or several sources,
with or without replacement, repeated tokens, rows that sum below 1, drawn tokens that stand in no node. Point masses
chosen before a single sampled draw that excludes them are fine for the same reason; other point masses ahead of sampled
draws are refused, because nothing then shows that the row accounts for them. Costs a pass over the vocabulary for each
rejection and one for each final draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree
from outrider.verify.residual import accept_ratio, after_rejection, at_row
from outrider.verify.walk import follow, follow_draws, refuse_points_first


class Recursive:
    name = "recursive"
    honours = frozenset(Law) - {Law.OTHER}
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_points_first(tree)
        return follow_draws(tree, rows, noise, _choose)


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token distributed as p, a sampled one where possible."""
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


def acceptance(p: Tensor, rows: Sequence[QRow]) -> float:
    """Probability that one of the draws is kept: 1 - prod (1 - sum min(p_j, q_j)).

    Independent draws have one row k times. Without replacement each row depends on the tokens rejected before it, and
    the figure is of one such sequence of rows.
    """
    left, mass, missed = p, 1.0, 1.0
    for row in rows:
        missed *= 1.0 - float(np.minimum(at_row(left, row) / mass, row.probs).sum())
        left, mass = after_rejection(left, mass, row)
    return 1.0 - missed
