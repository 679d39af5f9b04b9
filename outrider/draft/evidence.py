"""Evidence: how likely a candidate is, from which drafters propose it and how sure they are, learnt on line.

Drafters' own guesses cannot be compared: a token copied from one occurrence and a table's favourite both claim 0.9.
Each candidate is therefore judged by its *kind* (the set of drafters that propose it, how strongly, and how near the
root), and each kind by how often such candidates turned out right; a kind that was seldom seen is judged by how far
the word of its drafters could be trusted in general. Every emitted token judges the candidates of its place, also those
that were cut or not verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.compiled import compiled
from outrider.errors import InputError
from outrider.tree import TokenTree

STRENGTHS = 12  # grades of how sure a drafter is, each a factor of 1.6
PLACES = 3  # at the root, just below, deeper
MOST_DRAFTERS = 5


class Union(NamedTuple):  # a tuple: compiled code makes one each step
    """Candidates of several trees as one trie; node 0 is the pending token."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    masks: NDArray[np.int64]  # bit s: drafter s proposed it
    edges: NDArray[np.float64]  # the surest drafter's chance of it, given its parent
    sources: NDArray[np.int64]  # that drafter
    weights: NDArray[np.float64]  # chance that the path down to it is accepted; falls along a path
    order: NDArray[np.int64]  # candidates, likeliest first, parents before children


_NONE = np.zeros(1, dtype=np.int64)
NO_CANDIDATES = Union(_NONE, _NONE - 1, _NONE, _NONE, np.ones(1), _NONE, np.ones(1), _NONE[:0])


@dataclass(slots=True)
class Evidence:
    drafters: int
    trust: float = 4.0  # observations that the drafters' own word counts for
    keep: float = 0.98  # how much of a kind's record each new observation of it leaves
    counts: NDArray[np.float64] = field(init=False)  # [set of drafters, place, strength, (offered, right, claimed)]

    def __post_init__(self) -> None:
        if self.drafters > MOST_DRAFTERS:  # the table grows with the sets of drafters
            raise InputError(f"{self.drafters} drafters of chosen candidates in one tree; use at most {MOST_DRAFTERS}")
        self.counts = np.zeros((1 << self.drafters, PLACES, STRENGTHS, 3))

    def weigh(self, trees: Sequence[TokenTree], first: int = 0) -> Union:
        """All their candidates; `first` is the number of the drafter of the first tree."""
        given = [(number, tree) for number, tree in enumerate(trees, first) if tree.candidates]
        if not given:
            return NO_CANDIDATES
        sizes = np.array([(number, len(tree)) for number, tree in given])
        if len(given) == 1:  # the usual case: nothing to join
            tree = given[0][1]
            return Union(*_weighed(tree.tokens, tree.parents, _claims(tree), sizes, self.counts, self.trust))
        tokens = np.concatenate([tree.tokens for _, tree in given])
        parents = np.concatenate([tree.parents for _, tree in given])
        claims = np.concatenate([_claims(tree) for _, tree in given])
        return Union(*_weighed(tokens, parents, claims, sizes, self.counts, self.trust))

    def learn(self, own: Union, emitted: Sequence[int]) -> None:
        """Changes state: the text went on with these tokens."""
        text = np.array(emitted, dtype=np.int64)
        _learn(own.tokens, own.parents, own.depths, own.masks, own.edges, text, self.counts, self.keep)


def _claims(tree: TokenTree) -> NDArray[np.float64]:
    return np.ones(len(tree)) if tree.weights is None else tree.weights


@compiled
def _weighed(tokens, parents, claims, sizes, counts, trust):  # type: ignore[no-untyped-def]
    tokens, parents, depths, masks, edges, sources = _unite(tokens, parents, claims, sizes)
    weights = _weigh(parents, depths, masks, edges, counts, trust)
    order = 1 + np.argsort(-weights[1:], kind="mergesort")  # stable
    return tokens, parents, depths, masks, edges, sources, weights, order


@compiled
def _unite(tokens, parents, weights, sizes):  # type: ignore[no-untyped-def]
    """`sizes`: each tree's drafter and rows."""
    most = len(tokens)
    out_tokens = np.empty(most, np.int64)
    out_parents = np.empty(most, np.int64)
    depths = np.zeros(most, np.int64)
    masks = np.zeros(most, np.int64)
    edges = np.zeros(most, np.float64)
    sources = np.zeros(most, np.int64)
    child = np.full(most, -1, np.int64)  # a node's newest child, and each child's older sibling
    older = np.full(most, -1, np.int64)
    place = np.zeros(most, np.int64)
    out_tokens[0], out_parents[0], edges[0], count, base = tokens[0], -1, 1.0, 1, 0
    for drafter, size in sizes:
        for i in range(base + 1, base + size):
            above = base + parents[i]
            parent = place[above] if parents[i] > 0 else 0
            edge = min(max(weights[i] / max(weights[above], 1e-12), 1e-6), 1.0)
            node = child[parent]
            while node >= 0 and out_tokens[node] != tokens[i]:
                node = older[node]
            if node < 0:
                node = count
                count += 1
                out_tokens[node], out_parents[node], depths[node] = tokens[i], parent, depths[parent] + 1
                older[node], child[parent] = child[parent], node
            if edge > edges[node]:
                edges[node], sources[node] = edge, drafter
            masks[node] |= 1 << drafter
            place[i] = node
        base += size
    return out_tokens[:count], out_parents[:count], depths[:count], masks[:count], edges[:count], sources[:count]


@compiled
def _strength(edge):  # type: ignore[no-untyped-def]
    return min(int(-np.log(edge) / 0.47), STRENGTHS - 1)


@compiled
def _weigh(parents, depths, masks, edges, counts, trust):  # type: ignore[no-untyped-def]
    size = len(parents)
    honest = np.empty(len(counts))  # by set of drafters: right ones for each that they claimed
    for mask in range(len(counts)):
        honest[mask] = (counts[mask, :, :, 1].sum() + trust) / (counts[mask, :, :, 2].sum() + trust)
    chance = np.empty(size)
    among = np.zeros(size)  # of a node's children together: one of them is right at most
    for i in range(1, size):
        offered, right, _ = counts[masks[i], min(depths[i], PLACES) - 1, _strength(edges[i])]
        chance[i] = (right + trust * min(edges[i] * honest[masks[i]], 1.0)) / (offered + trust)
        among[parents[i]] += chance[i]
    weights = np.ones(size)
    for i in range(1, size):
        weights[i] = weights[parents[i]] * chance[i] / max(among[parents[i]], 1.0)
    return weights


@compiled
def _learn(tokens, parents, depths, masks, edges, text, counts, keep):  # type: ignore[no-untyped-def]
    node = 0
    for depth in range(len(text)):
        found = -1
        for i in range(node + 1, len(tokens)):
            if parents[i] == node:
                own = counts[masks[i], min(depths[i], PLACES) - 1, _strength(edges[i])]
                right = tokens[i] == text[depth]
                own[0] = own[0] * keep + 1.0
                own[1] = own[1] * keep + (1.0 if right else 0.0)
                own[2] = own[2] * keep + edges[i]
                if right:
                    found = i
        if found < 0:
            return
        node = found
