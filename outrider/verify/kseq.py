"""SpecTr's k-SEQ for independent drafts: each of k draws is tested once against one relaxed ratio (arXiv 2310.15141).

A draw x is kept with probability min(1, p(x) / (rho q(x))); after k failures the token comes from what the k tests
cannot have said. rho is the least factor that leaves that residual non-negative, found by bisection, and the acceptance
is then at least 1 - 1/e of the best that any rule can do with the same draws.

Lossless for draws that all come from one row, repeated tokens and rows that sum below 1 included; a node of point
masses is followed by the target's own draw. Other draws are refused: the residual counts on independence. A node costs
a bisection over the sparse row, and a pass over the vocabulary where every draw failed.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree
from outrider.verify.residual import accept_ratio, after_rejection, at_row
from outrider.verify.walk import follow, follow_draws, refuse_other_laws

_PRECISE = 1e-13  # width of the bracket around rho


class KSeq:
    name = "k-seq"
    honours = frozenset({Law.NONE, Law.FIXED, Law.IID})
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_other_laws(tree, self.name, self.honours)
        return follow_draws(tree, rows, noise, _choose)


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token distributed as p, a drawn one where possible."""
    if not draws or (row := draws[0].row) is None:
        return noise.draw(p, node, len(draws))
    over = at_row(p, row)
    rho = factor(over, row.probs, len(draws))
    for j, draw in enumerate(draws):
        if draw.token != NOTHING:
            accept = accept_ratio(p, rho, draw)
            if accept > 0.0 and noise.coin(accept, node, j):  # the first test: no coin may save a token with p = 0
                return draw.token
    kept = np.minimum(row.probs, over / rho)  # probability that one test says x
    left, _ = after_rejection(p, 1.0, QRow(row.ids, kept * _tests(float(kept.sum()), len(draws))))
    return noise.draw(left, node, len(draws))


def acceptance(p: Tensor, row: QRow, draws: int) -> float:
    """Probability that one of the draws is kept."""
    over = at_row(p, row)
    beta = float(np.minimum(row.probs, over / factor(over, row.probs, draws)).sum())
    return beta * _tests(beta, draws)


def factor(p: NDArray[np.float64], q: NDArray[np.float64], draws: int) -> float:
    """The root rho in [1, k] of 1 - (1 - beta)^k = rho beta, beta = sum min(q, p / rho); from above.

    `p` and `q` are over the tokens of the row. Above the root the residual is non-negative, so rounding is on the safe
    side.
    """
    order = np.argsort(p / q)
    ratios: list[float] = (p / q)[order].tolist()
    below = [0.0, *np.cumsum(p[order]).tolist()]  # p of the tokens with ratio < rho
    above = [*np.cumsum(q[order][::-1])[::-1].tolist(), 0.0]  # q of the others

    def excess(rho: float) -> float:
        at = bisect_left(ratios, rho)
        beta = min(1.0, above[at] + below[at] / rho)
        return beta * (_tests(beta, draws) - rho)

    low, high = 1.0, float(draws)
    if excess(low) <= 0.0:
        return low
    while high - low > _PRECISE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return high


def _tests(beta: float, draws: int) -> float:
    """(1 - (1 - beta)^k) / beta: how many draws are tested on average, without loss at a small beta."""
    if not 0.0 < beta < 1.0:
        return 1.0 if beta else float(draws)
    return -math.expm1(draws * math.log1p(-beta)) / beta
