"""Optimal transport: the best exact coupling of a node's drafts with the target, by linear programming.

The plan says which of the drafted tokens to keep, for every set of tokens that the drafts can be, so that the token
said is one of them as often as any exact rule can make it. The size of the program grows with the number of such
sets: this is the reference and upper bound for small vocabularies, not a rule for real ones.

Lossless for point masses, independent drafts, drafts without replacement and top-plus-one; the rest is refused, and so
are rows without replacement that may propose nothing. The solver's plan is scaled to be feasible exactly, so its
tolerance costs acceptance, never exactness. Needs scipy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InputError, MissingExtra, UnsupportedDraws
from outrider.core.protocols import Noise, Rows
from outrider.core.records import Verdict
from outrider.core.tree import NOTHING, Draw, Law, QRow, TokenTree, law_of
from outrider.verify.walk import follow, follow_draws, refuse_other_laws

MAX_VOCABULARY, MAX_SETS = 64, 5_000
Tokens = frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    keep: Mapping[Tokens, NDArray[np.float64]]  # drafted tokens -> probability of keeping each, in order of id
    left: NDArray[np.float64]  # [V] weights of the token said where none is kept
    acceptance: float


class Transport:
    name = "transport"
    honours = frozenset({Law.NONE, Law.FIXED, Law.IID, Law.WITHOUT_REPLACEMENT, Law.TOP_PLUS_ONE})
    coupled = True

    def verify(self, tree: TokenTree, rows: Rows, noise: Noise) -> Verdict:
        if rows.greedy:
            return follow(tree, rows.argmax)
        refuse_other_laws(tree, self.name, self.honours)
        for node, draws in enumerate(tree.draws):
            _refuse_unlikely(node, draws)
        return follow_draws(tree, rows, noise, _choose)


def _choose(p: Tensor, draws: tuple[Draw, ...], node: int, noise: Noise) -> int:
    """One token distributed as p, a drafted one as often as can be."""
    if not draws:
        return noise.draw(p, node, 0)
    if p.numel() > MAX_VOCABULARY:
        raise InputError(
            f"the transport rule solves a linear program a node and takes at most {MAX_VOCABULARY} tokens, "
            f"not {p.numel()}; verify with another rule"
        )
    plan = _plan_for(tuple(p.double().tolist()), *_scheme(draws))
    drafted = sorted({draw.token for draw in draws} - {NOTHING})
    keep = plan.keep[frozenset(drafted)]
    chosen = noise.draw(np.append(keep, max(0.0, 1.0 - keep.sum())), node, 0)
    return drafted[chosen] if chosen < len(drafted) else noise.draw(plan.left, node, 1)


def transport_acceptance(p: NDArray[np.float64], q: QRow, k: int, scheme: Law) -> float:
    """The optimum of `optimal_acceptance` from the linear program, for small vocabularies."""
    if scheme is Law.TOP_PLUS_ONE:
        order = np.argsort(-q.probs, kind="stable")
        points, rest = q.ids[order[: k - 1]], q
        for token in points:
            rest = rest.without(int(token))
        return transport(p, draft_probs(rest, min(1, len(rest.ids)), Law.IID, frozenset(points.tolist()))).acceptance
    return transport(p, draft_probs(q, k, scheme)).acceptance


def draft_probs(row: QRow, k: int, scheme: Law, points: Tokens = frozenset()) -> dict[Tokens, float]:
    """How likely each set of drafted tokens is: k draws from `row`, iid or without replacement, beside point masses."""
    sets: dict[Tokens, float] = {points: 1.0}
    lacking = max(0.0, 1.0 - float(row.probs.sum()))
    for _ in range(k):
        grown: dict[Tokens, float] = {}
        for tokens, weight in sets.items():
            q = row
            if scheme is Law.WITHOUT_REPLACEMENT:
                for token in tokens:
                    q = q.without(token)
            if lacking > 1e-12 or not len(q.ids):  # no proposal
                grown[tokens] = grown.get(tokens, 0.0) + weight * (lacking if len(q.ids) else 1.0)
            for token, probability in zip(q.ids.tolist(), q.probs.tolist(), strict=True):
                more = tokens | {token}
                grown[more] = grown.get(more, 0.0) + weight * probability
        sets = grown
        if len(sets) > MAX_SETS:
            raise InputError(f"more than {MAX_SETS} sets of drafts; take fewer draws or a smaller vocabulary")
    return sets


def transport(p: NDArray[np.float64], drafts: Mapping[Tokens, float]) -> Plan:
    """Maximise the flow from sets of drafts to tokens they hold: out of a set at most its chance, into a token p."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError as error:
        raise MissingExtra("the transport rule needs scipy: pip install 'outrider[bench]'") from error
    sets = list(drafts)
    pairs = [(i, t) for i, tokens in enumerate(sets) for t in sorted(tokens) if t < len(p)]
    flow = np.zeros(len(pairs))
    source, sink = np.array([i for i, _ in pairs], dtype=np.int64), np.array([t for _, t in pairs], dtype=np.int64)
    supply = np.array(list(drafts.values()))
    if pairs:
        where = np.concatenate([source, len(sets) + sink]), np.tile(np.arange(len(pairs)), 2)
        limits = coo_array((np.ones(2 * len(pairs)), where), shape=(len(sets) + len(p), len(pairs)))
        found = linprog(
            -np.ones(len(pairs)), A_ub=limits, b_ub=np.concatenate([supply, p]), method="highs",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )  # fmt: skip
        assert found.status == 0, f"the solver failed: {found.message}"
        flow = np.maximum(found.x, 0.0)
        flow *= _within(np.bincount(source, flow, len(sets)), supply)[source]
        flow *= _within(np.bincount(sink, flow, len(p)), p)[sink]
    keep: dict[Tokens, NDArray[np.float64]] = {tokens: np.zeros(len(tokens)) for tokens in sets}
    for (i, token), share in zip(pairs, flow, strict=True):
        keep[sets[i]][sorted(sets[i]).index(token)] = share / supply[i] if supply[i] > 0 else 0.0
    left = np.maximum(p - np.bincount(sink, flow, len(p)), 0.0)
    return Plan(keep, left if left.sum() > 0 else p, float(flow.sum()))


def _within(sums: NDArray[Any], limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """What to scale by so that no sum passes its limit."""
    return np.where(sums > limits, limits / np.maximum(sums, 1e-300), 1.0)


def _scheme(draws: tuple[Draw, ...]) -> tuple[tuple[int, ...], tuple[float, ...], int, Law, Tokens]:
    """How the set of drafts came about: row, number of draws, with or without replacement, point masses."""
    points = frozenset(draw.token for draw in draws if draw.row is None)
    sampled = [draw.row for draw in draws if draw.row is not None]
    row = sampled[0] if sampled else QRow(np.zeros(0, dtype=np.int64), np.zeros(0))
    law = law_of([draw for draw in draws if draw.row is not None])
    return tuple(row.ids.tolist()), tuple(row.probs.tolist()), len(sampled), law, points


@lru_cache(maxsize=4096)
def _plan_for(
    p: tuple[float, ...], ids: tuple[int, ...], probs: tuple[float, ...], k: int, law: Law, points: Tokens
) -> Plan:
    row = QRow(np.array(ids, dtype=np.int64), np.array(probs))
    return transport(np.array(p), draft_probs(row, k, law, points))


def _refuse_unlikely(node: int, draws: tuple[Draw, ...]) -> None:
    """Draws that their row cannot have made, and rows for which the draws do not tell how they were made."""
    for draw in draws:
        if draw.row is not None and draw.token != NOTHING and draw.row.prob(draw.token) <= 0.0:
            raise UnsupportedDraws(
                f"token {draw.token} cannot have been drawn from a row that gives it no probability; "
                "hand over the row that the draw was made from"
            )
    if law_of(draws) is Law.WITHOUT_REPLACEMENT and draws[0].row is not None and draws[0].row.probs.sum() < 1 - 1e-9:
        raise UnsupportedDraws(
            f"node {node} drew without replacement from a row that may propose nothing, so how often it drew is itself "
            "random; normalise the row, or verify with the recursive rule"
        )
