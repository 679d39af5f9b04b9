"""What an acceptance rule reaches, computed instead of played: hits among k drafts at one position, tokens a step on a
tree.

`hits` has closed forms, except without replacement: there the rows depend on the tokens refused before, and the figure
is an unbiased mean over sampled refusals. `tree_tokens` runs the real rule and takes every way its coins can fall, so
that given the tree nothing is sampled; on a chain `chain_tokens` also averages each draw over its row. All of it needs
only the target's distribution p and the draft's rows q.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.check.enumeration import Branches, branches
from outrider.core.protocols import Noise, Rows, Verifier
from outrider.core.tree import NOTHING, Law, QRow, TokenTree
from outrider.verify import kseq, recursive
from outrider.verify.optimal import optimal_acceptances
from outrider.verify.residual import at_row

OPTIMUM = "optimum"
SCHEMES = (Law.IID, Law.WITHOUT_REPLACEMENT, Law.TOP_PLUS_ONE, Law.FIXED)
RULES: dict[Law, tuple[str, ...]] = {
    Law.IID: ("invariant", "naive", "recursive", "k-seq"),
    Law.WITHOUT_REPLACEMENT: ("invariant", "naive", "recursive"),
    Law.TOP_PLUS_ONE: ("invariant", "optimal"),  # here the naive and the recursive rule are the optimal one
    Law.FIXED: ("invariant",),  # the k likeliest tokens as point masses: every rule hits with their probability
}
SAMPLED = {(Law.WITHOUT_REPLACEMENT, rule) for rule in RULES[Law.WITHOUT_REPLACEMENT]}
Array = NDArray[np.float64]


def hits(p: Tensor, q: QRow, k: int, scheme: Law, rng: np.random.Generator, sequences: int = 64) -> dict[str, Array]:
    """[k] for each rule and for the optimum: the chance that the token said is one of 1 .. k drafts made from q."""
    if scheme is Law.FIXED:
        likeliest = np.cumsum(at_row(p, q)[_ranked(q)])
        best = likeliest[np.minimum(np.arange(k), len(likeliest) - 1)]
        return {OPTIMUM: best, "invariant": best}
    best = optimal_acceptances(p, q, k, scheme)
    if scheme is Law.IID:
        reached = _independent(p, q, k)
    elif scheme is Law.WITHOUT_REPLACEMENT:
        reached = _without_replacement(at_row(p, q), q.probs, k, rng, sequences)
    else:
        reached = {"invariant": _top_plus_one(at_row(p, q), q, k), "optimal": best}
    return {OPTIMUM: best, **reached}


def _independent(p: Tensor, q: QRow, k: int) -> dict[str, Array]:
    over, drafts = at_row(p, q), np.arange(1, k + 1)
    drawn = 1.0 - (1.0 - q.probs) ** np.arange(k + 1)[:, None]  # [k + 1, n] chance to be among so many draws
    spare = np.maximum(over - q.probs, 0.0)
    return {
        "invariant": drawn[1:] @ over,
        "naive": np.minimum(over, q.probs).sum() + drawn[:-1] @ spare,
        "recursive": np.array([recursive.acceptance(p, [q] * int(j)) for j in drafts]),
        "k-seq": np.array([kseq.acceptance(p, q, int(j)) for j in drafts]),
    }


def _top_plus_one(p: Array, q: QRow, k: int) -> Array:
    """The target's own draw hits the top j - 1 tokens, or the one drawn from the rest."""
    order = _ranked(q)
    p, probs = p[order], q.probs[order]
    rest = np.maximum(np.cumsum(probs[::-1])[::-1], 1e-300)  # of the row from each place on
    tops = [p[:j].sum() + (p[j:] @ probs[j:] / rest[j] if j < len(p) else 0.0) for j in range(k)]
    return np.array(tops)


def _without_replacement(p: Array, q: Array, k: int, rng: np.random.Generator, sequences: int) -> dict[str, Array]:
    """`p` and `q` over the tokens of the row, q summing to 1. Exact for one draft, an unbiased mean for more."""
    refused = np.maximum(q - p, 0.0)
    either = refused if refused.sum() > 0 else q
    naive = np.minimum(p, q).sum() + np.zeros(k)
    if k > 1 and len(q) > 1:
        first = _race(np.tile(either, (sequences, 1)), rng)
        naive[1:] += _drawn_mass(np.maximum(p - q, 0.0), _less(np.tile(q, (sequences, 1)), first), k - 1, rng)
    return {
        "invariant": _drawn_mass(p, np.tile(q, (sequences, 1)), k, rng),
        "naive": naive,
        "recursive": _recursive(p, q, k, rng, sequences),
    }


def _recursive(p: Array, q: Array, k: int, rng: np.random.Generator, sequences: int) -> Array:
    """1 - the chance that all are refused; the refused tokens of each sequence are drawn as the rule refuses them."""
    rows, left = np.tile(q, (sequences, 1)), np.tile(p, (sequences, 1))  # [S, n]; p_j = left / mass
    beyond = max(1.0 - float(p.sum()), 0.0)  # the target's probability outside the row: no draft touches it
    missed, reached = np.ones(sequences), np.empty(k)
    for j in range(min(k, len(q))):
        mass = np.maximum(left.sum(1) + beyond, 1e-300)[:, None]
        both = np.minimum(left, mass * rows)
        refused = np.maximum(rows - both / mass, 0.0)
        missed *= refused.sum(1)
        left -= both
        reached[j:] = 1.0 - missed.mean()  # and where the row has ended, no further draft changes it
        rows = _less(rows, _race(np.where(refused.any(1)[:, None], refused, rows), rng))
    return reached


def _drawn_mass(weights: Array, rows: Array, k: int, rng: np.random.Generator) -> Array:
    """[k] the mean weight of the tokens that 1 .. k draws without replacement from `rows` [S, n] bring together."""
    mass, total = np.empty(k), 0.0
    for j in range(k):
        total += float((rows @ weights).mean())  # of draw j, given those before it
        mass[j] = total
        rows = _less(rows, _race(rows, rng))
    return mass


def _race(weights: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """[S] one index a row, with probability proportional to its weight: the first of exponential clocks."""
    with np.errstate(divide="ignore"):
        return (rng.standard_exponential(weights.shape) / weights).argmin(1)


def _less(rows: Array, tokens: NDArray[np.int64]) -> Array:
    """The rows of the next draw; all zeros where nothing is left."""
    rows = rows.copy()
    rows[np.arange(len(rows)), tokens] = 0.0
    return rows / np.maximum(rows.sum(1), 1e-300)[:, None]


def _ranked(q: QRow) -> NDArray[np.int64]:
    return np.argsort(-q.probs, kind="stable")


def chain_tokens(tree: TokenTree, rows: Rows) -> dict[str, float]:
    """Expected tokens of one step on a drawn chain, the target's own included, for three rules.

    Depth i adds the chance that a rule goes so far: a product of p, of min(1, p/q), or block verification's w_i. Each
    is averaged over the row that draw i was made from, given the draws before it.
    """
    tokens = {"invariant": 1.0, "rejection": 1.0, "block": 1.0}
    followed = kept = w = 1.0
    for node in range(len(tree) - 1):
        draw = tree.draws[node][0]
        assert draw.row is not None, "a chain that was drawn"
        p, q = at_row(rows.probs(node), draw.row), draw.row.probs
        tokens["invariant"] += followed * float(p @ q)
        tokens["rejection"] += kept * float(np.minimum(q, p).sum())
        tokens["block"] += float(np.minimum(q, w * p).sum())
        said = p[draw.row.ids == draw.token].item()
        ratio = said / draw.row.prob(draw.token)
        followed, kept, w = followed * said, kept * min(1.0, ratio), min(1.0, w * ratio)
    return tokens


def tree_tokens(rule: Verifier, tree: TokenTree, rows: Rows) -> float:
    """Expected tokens of one step on this tree, the target's own included; exact given the tree."""
    if not rule.coupled:  # the target's own draw is followed: a node is reached with the probability of its path
        reach = np.ones(len(tree))
        for node in range(1, len(tree)):
            parent = int(tree.parents[node])
            reach[node] = reach[parent] * float(rows.probs(parent)[tree.tokens[node]])
        return float(reach.sum())

    def accepted(paths: Branches) -> int:
        return len(rule.verify(tree, rows, _EveryWay(tree, paths)).path)

    return 1.0 + sum(count * chance for count, chance in branches(accepted))


@dataclass(frozen=True, slots=True)
class _EveryWay:
    """Noise that takes every way; the tokens that no child of the node carries are one outcome."""

    tree: TokenTree
    paths: Branches

    def coin(self, p: float, node: int, draw: int) -> bool:
        return bool(self.paths.decide((node, draw), [1.0 - p, p]))

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        values = torch.as_tensor(weights)
        tokens = self.tree.tokens[self.tree.children(node)]
        odds: list[float] = values[torch.from_numpy(tokens).to(values.device)].double().tolist()
        rest = max(float(values.sum(dtype=torch.float64)) - sum(odds), 0.0)
        chosen = self.paths.decide((node, draw), [*odds, rest])
        return int(tokens[chosen]) if chosen < len(tokens) else NOTHING

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        raise AssertionError("only the invariant rule picks, and it is not run")

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        return [self.pick(row, ()) for row in probs]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one tree inside a larger one that was run."""

    whole: Rows
    places: Mapping[int, int]  # node of this tree -> node of the larger one
    greedy: bool = False

    def probs(self, node: int) -> Tensor:
        return self.whole.probs(self.places[node])

    def argmax(self, node: int) -> int:
        return self.whole.argmax(self.places[node])

    def pick(self, node: int, path: Sequence[int], noise: Noise) -> int:
        raise AssertionError("only the invariant rule picks, and it is not run")

    def together(self) -> None:
        return None


def part_of(whole: TokenTree, rows: Rows, tree: TokenTree) -> Part:
    """The rows of `tree`, all of whose paths stand in `whole` too."""
    places = {0: 0}
    for node in range(1, len(tree)):
        places[node] = whole.child(places[int(tree.parents[node])], int(tree.tokens[node]))
        assert places[node] != NOTHING, "a path that was not run"
    return Part(rows, places)
