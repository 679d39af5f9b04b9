"""Optimal multi-draft verification: the best acceptance that any exact rule can reach, and a rule that reaches it.

`Optimal` takes greedy drafts, the k - 1 likeliest tokens and one sampled from the rest (arXiv 2502.18779): the sampled
one is kept with probability min(1, p/r), else a token comes from norm([p - r]+), where every point mass is a hit. No
coupling of these drafts with the target accepts more. Lossless for any p and r as long as the point masses were chosen
without looking at the sampled token; nodes with several sampled draws are refused. Costs at most one rejection and one
final draw a node.

`optimal_acceptance` is analysis, not a rule: for independent drafts and for drafts without replacement no rule of
practical cost is known that reaches it. It is a minimum over prefixes of the tokens sorted by p/q: n log n for a row of
n tokens, and without replacement a further n passes over k x 200 numbers (a second at n = 49,000, milliseconds at 256).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InputError, UnsupportedDraws
from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree, law_of
from outrider.verify.residual import accept_ratio, after_rejection, at_row
from outrider.verify.walk import follow, follow_draws

SCHEMES = (Law.IID, Law.WITHOUT_REPLACEMENT, Law.TOP_PLUS_ONE)
_POINTS, _STEP = 200, 0.25  # of the grid in log T: at least so many, at most so far apart
_EARLIEST, _LATEST = math.exp(-14), 40.0  # two arrivals before, or none of the rest after: chances below 1e-17


class Optimal:
    name = "optimal"
    honours = frozenset({Law.NONE, Law.FIXED, Law.IID, Law.TOP_PLUS_ONE})  # one sampled draw a node
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        for node, draws in enumerate(tree.draws):
            if len(draws) > 1 and not _points_and_one(draws):
                raise UnsupportedDraws(
                    f"the optimal rule takes the likeliest tokens and one sampled from the rest, and the draws of "
                    f"node {node} are {law_of(draws)}; grow top-plus-one trees, or verify with the recursive rule"
                )
        return follow_draws(tree, rows, noise, _choose)


def _points_and_one(draws: tuple[Draw, ...]) -> bool:
    """`law_of` is fixed or top-plus-one, known faster."""
    points, row = draws[:-1], draws[-1].row
    return all(d.row is None for d in points) and (row is None or not any(row.prob(d.token) for d in points))


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token distributed as p. The sampled draw stands last; point masses are hit by the final draw."""
    left = p
    if draws and (draw := draws[-1]).row is not None:
        if draw.token != NOTHING:
            accept = accept_ratio(p, 1.0, draw)
            if accept > 0.0 and noise.coin(accept, node, len(draws) - 1):  # no coin may save a token with p = 0
                return draw.token
        left, _ = after_rejection(p, 1.0, draw.row)
    return noise.draw(left, node, len(draws))


def optimal_acceptance(p: Tensor | NDArray[np.floating], q: QRow, k: int, scheme: Law) -> float:
    """The largest probability, over all exact rules, that the token said is one of k drafts made from q."""
    return float(optimal_acceptances(p, q, k, scheme)[-1])


def optimal_acceptances(p: Tensor | NDArray[np.floating], q: QRow, k: int, scheme: Law) -> NDArray[np.float64]:
    """[k] `optimal_acceptance` for 1 .. k drafts, in the time of the last one."""
    if k < 1 or scheme not in SCHEMES or not len(q.ids):
        known = ", ".join(SCHEMES)
        raise InputError(f"no optimum for {k} drafts drawn {scheme}; ask for 1 or more from a row, drawn {known}")
    over = _at(p, q)
    if scheme is Law.TOP_PLUS_ONE:
        return _top_plus_one(over, q.probs, k)
    lacking = 1.0 - float(q.probs.sum())
    if scheme is Law.WITHOUT_REPLACEMENT and abs(lacking) > 1e-6:
        raise InputError("a row that may propose nothing has no optimum without replacement; normalise it first")
    order = np.argsort(over / q.probs, kind="stable")
    said = np.concatenate([[0.0], np.cumsum(over[order])])  # P(H) for each prefix H
    if scheme is Law.IID:
        within = max(lacking, 0.0) + np.concatenate([[0.0], np.cumsum(q.probs[order])])
        inside = np.minimum(within, 1.0) ** np.arange(1.0, k + 1)[:, None]
    else:
        inside = _inside_without_replacement(q.probs[order] / q.probs.sum(), k)
    return 1.0 + (said - inside).min(
        axis=1
    )  # max-flow is min-cut: over H, P(H) less the chance that all drafts lie in H


def _top_plus_one(p: NDArray[np.float64], q: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """P(A) + sum min(p, r) for A the top j - 1 and r the rest, scaled up to the row's total."""
    order = np.argsort(-q, kind="stable")
    p, q = p[order], q[order]
    best = np.empty(k)
    for j in range(k):
        rest = float(q[j:].sum())
        r = q[j:] * (q.sum() / rest) if rest > 0 else q[j:]
        best[j] = p[:j].sum() + np.minimum(p[j:], r).sum()
    return best


def _inside_without_replacement(q: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """[k, n + 1] chance that the first 1 .. k draws without replacement all lie in each prefix H of the tokens.

    Tokens arrive at exponential times of rate q; T, the first arrival outside H, has rate 1 - q(H), and the first j
    draws lie in H if j of its tokens arrive before T. The integral over T is a trapezoid sum on one grid in log T for
    all prefixes, so that the chances of 0 .. k - 1 arrivals by each T are carried from prefix to prefix.
    """
    count = len(q)
    outside = np.append(np.cumsum(q[::-1])[::-1], 0.0)  # summed from the small end: 1 - q(H) would cancel
    low, high = math.log(_EARLIEST), math.log(_LATEST / q[-1])
    u, step = np.linspace(low, high, max(_POINTS, math.ceil((high - low) / _STEP)), retstep=True)
    time = np.exp(u)  # [G]
    arrived = np.zeros((k, len(u)))  # chance that exactly j of H have arrived by each time
    arrived[0] = 1.0
    inside = np.zeros((k, count + 1))
    for i in range(count - 1):
        now = -np.expm1(-q[i] * time)
        gone = arrived * now
        arrived -= gone
        arrived[1:] += gone[:-1]
        rate = outside[i + 1] * time
        density = rate * np.exp(-rate) * step  # of T, in log T
        inside[:, i + 1] = density.sum() - np.cumsum(arrived, axis=0) @ density
    inside[0] = np.concatenate([[0.0], np.cumsum(q)])
    inside[:, count] = 1.0
    return inside


def _at(p: Tensor | NDArray[np.floating], q: QRow) -> NDArray[np.float64]:
    if isinstance(p, Tensor):
        return at_row(p, q)
    return np.where(q.ids < len(p), p[np.minimum(q.ids, len(p) - 1)], 0.0).astype(np.float64)
