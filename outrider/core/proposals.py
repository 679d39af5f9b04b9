"""Proposals: what a drafter offers for a step, and the candidates of it that a controller may still choose from.

A tree is verified whole: sampled draws are never cut. Point masses may be cut, so a mixture offers them as
`Candidates`, a trie of everything its drafters proposed, of which the controller keeps what pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.tree import TokenTree, fixed, merge


class Candidates(NamedTuple):  # a tuple: compiled code makes one each step
    """Point masses of several drafters as one trie, parents before children; node 0 is the pending token."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    makers: NDArray[np.int64]  # bit i: drafter i proposed it
    claims: NDArray[np.float64]  # the surest drafter's chance of it, given its parent
    sources: NDArray[np.int64]  # that drafter

    @property
    def total(self) -> int:
        return len(self.tokens) - 1


_NONE = np.zeros(1, dtype=np.int64)
NO_CANDIDATES = Candidates(_NONE, _NONE - 1, _NONE, _NONE, np.ones(1), _NONE)


class Run(NamedTuple):
    """One drafter asked once for a batch."""

    part: int  # its number in the mixture
    levels: int  # times that it ran one after the other; 0: it was not asked
    seconds: float
    looking: float = 0.0  # seconds that it took to read the target's rows of the step before


@dataclass(frozen=True, slots=True)
class Proposals(Sequence[TokenTree]):
    """One tree a slot; `levels` is how many times, one after the other, the drafter ran for them."""

    trees: Sequence[TokenTree]
    levels: int = 0
    candidates: Sequence[Candidates] = ()  # one trie a slot, beside its tree: any part that hangs on node 0 may stay
    names: tuple[str, ...] = ()  # of the drafters of the candidates
    runs: tuple[Run, ...] = ()

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.trees[index]

    def __iter__(self) -> Iterator[TokenTree]:
        return iter(self.trees)

    def tree(self, i: int, chosen: NDArray[np.int64], weights: NDArray[np.float64]) -> TokenTree:
        """What slot i verifies with these of its candidates, parents before children; `weights` are of all of them."""
        if not len(chosen):
            return self.trees[i]
        trie = self.candidates[i]
        tokens, parents, kept = _cut(trie.tokens, trie.parents, weights, chosen)
        origins = ("", *(self.names[source] for source in trie.sources[chosen].tolist()))
        point_masses = fixed(tokens, parents, origins, kept)
        return merge(self.trees[i], point_masses) if self.trees[i].candidates else point_masses


def united(trees: Sequence[tuple[int, TokenTree]]) -> Candidates:
    """The candidates of trees of point masses, each with its drafter's number."""
    given = [(number, tree) for number, tree in trees if tree.candidates]
    if not given:
        return NO_CANDIDATES
    sizes = np.array([(number, len(tree)) for number, tree in given])
    if len(given) == 1:  # the usual case: nothing to join
        tree = given[0][1]
        return Candidates(*_unite(tree.tokens, tree.parents, _weights(tree), sizes))
    tokens = np.concatenate([tree.tokens for _, tree in given])
    parents = np.concatenate([tree.parents for _, tree in given])
    weights = np.concatenate([_weights(tree) for _, tree in given])
    return Candidates(*_unite(tokens, parents, weights, sizes))


def everything(proposals: Proposals, rooms: Sequence[int]) -> list[TokenTree]:
    """Trees of all that is offered; of each slot's candidates the likeliest by their claims, within its room."""
    if not proposals.candidates:
        return list(proposals.trees)
    trees = []
    for i, (trie, room) in enumerate(zip(proposals.candidates, rooms, strict=True)):
        chances = _along(trie.parents, trie.claims)
        order = 1 + np.argsort(-chances[1:], kind="stable")  # along a path chances never rise: parents come first
        trees.append(proposals.tree(i, order[: max(room - proposals.trees[i].candidates, 0)], chances))
    return trees


def _weights(tree: TokenTree) -> NDArray[np.float64]:
    return np.ones(len(tree)) if tree.weights is None else tree.weights


@compiled
def _unite(tokens, parents, weights, sizes):  # type: ignore[no-untyped-def]
    """`sizes`: each tree's drafter and rows."""
    rows = len(tokens)
    out_tokens = np.empty(rows, np.int64)
    out_parents = np.empty(rows, np.int64)
    depths = np.zeros(rows, np.int64)
    makers = np.zeros(rows, np.int64)
    claims = np.zeros(rows, np.float64)
    sources = np.zeros(rows, np.int64)
    child = np.full(rows, -1, np.int64)  # a node's newest child, and each child's older sibling
    older = np.full(rows, -1, np.int64)
    place = np.zeros(rows, np.int64)
    out_tokens[0], out_parents[0], claims[0], count, base = tokens[0], -1, 1.0, 1, 0
    for drafter, size in sizes:
        for i in range(base + 1, base + size):
            above = base + parents[i]
            parent = place[above] if parents[i] > 0 else 0
            claim = min(max(weights[i] / max(weights[above], 1e-12), 1e-6), 1.0)
            node = child[parent]
            while node >= 0 and out_tokens[node] != tokens[i]:
                node = older[node]
            if node < 0:
                node = count
                count += 1
                out_tokens[node], out_parents[node], depths[node] = tokens[i], parent, depths[parent] + 1
                older[node], child[parent] = child[parent], node
            if claim > claims[node]:
                claims[node], sources[node] = claim, drafter
            makers[node] |= 1 << drafter
            place[i] = node
        base += size
    return out_tokens[:count], out_parents[:count], depths[:count], makers[:count], claims[:count], sources[:count]


@compiled
def _along(parents, claims):  # type: ignore[no-untyped-def]
    """Products of the claims down to each node."""
    out = np.ones(len(claims))
    for i in range(1, len(claims)):
        out[i] = out[parents[i]] * claims[i]
    return out


@compiled
def _cut(tokens, parents, weights, chosen):  # type: ignore[no-untyped-def]
    """Tokens, parents and weights of these nodes, which stand behind their parents, and of node 0 before them."""
    place = np.zeros(len(tokens), np.int64)
    above, kept = np.full(len(chosen) + 1, -1, np.int64), np.zeros(len(chosen) + 1, np.int64)
    for i in range(len(chosen)):
        kept[i + 1] = chosen[i]
        place[chosen[i]] = i + 1
        above[i + 1] = place[parents[chosen[i]]]
    return tokens[kept], above, weights[kept]
