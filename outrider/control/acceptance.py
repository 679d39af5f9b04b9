"""Acceptance: how likely a candidate is to be accepted, from which drafters propose it and how sure they are.

Drafters' guesses cannot be compared: a token copied from one occurrence and a table's favourite both claim 0.9. Each
candidate is therefore judged by its *kind* (the set of drafters that propose it, how strongly, and how near the root),
and each kind by how often such candidates turned out right; a kind that was seldom seen is judged by how far its
drafters' claims could be trusted in general. Every emitted token tells whether the candidates at its place were right,
also those that were cut and not verified. Changes no output. Cost: microseconds a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Candidates

STRENGTHS = 12  # grades of how sure a drafter is, each a factor of 1.6
PLACES = 3  # at the root, just below, deeper
MAX_DRAFTERS = 6  # the table of kinds doubles with each
CERTAIN, NOBODY = np.ones(1), np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Acceptance:
    drafters: int
    trust: float = 4.0  # observations that the drafters' claims count for
    keep: float = 0.98  # how much of a kind's record each new observation of it leaves
    counts: NDArray[np.float64] = field(init=False)  # [set of drafters, place, strength, (offered, right, claimed)]

    def __post_init__(self) -> None:
        if self.drafters > MAX_DRAFTERS:
            raise InputError(f"{self.drafters} drafters of chosen candidates in one tree; use at most {MAX_DRAFTERS}")
        self.counts = np.zeros((1 << self.drafters, PLACES, STRENGTHS, 3))

    def weights(self, candidates: Candidates) -> NDArray[np.float64]:
        """Of each node: the chance that the path down to it is accepted, which falls along a path."""
        return self.weighed(candidates)[0]

    def weighed(self, candidates: Candidates) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The weights of all nodes, and the candidates by them: likeliest first, parents before children."""
        if not candidates.total:
            return CERTAIN, NOBODY
        return _weighed(
            candidates.parents, candidates.depths, candidates.makers, candidates.claims, self.counts, self.trust
        )  # type: ignore[no-any-return]

    def learn(self, candidates: Candidates, emitted: Sequence[int]) -> None:
        """Changes state: the text went on with these tokens."""
        text = np.array(emitted, dtype=np.int64)
        _learn(
            candidates.tokens,
            candidates.parents,
            candidates.depths,
            candidates.makers,
            candidates.claims,
            text,
            self.counts,
            self.keep,
        )


@compiled
def ranked(weights):  # type: ignore[no-untyped-def]
    """Candidates, likeliest first, parents before children."""
    return 1 + np.argsort(-weights[1:], kind="mergesort")  # stable


@compiled
def _strength(claim):  # type: ignore[no-untyped-def]
    return min(int(-np.log(claim) / 0.47), STRENGTHS - 1)


@compiled
def _weigh(parents, depths, makers, claims, counts, trust):  # type: ignore[no-untyped-def]
    size = len(parents)
    honest = np.empty(len(counts))  # by set of drafters: right ones for each that they claimed
    for some in range(len(counts)):
        honest[some] = (counts[some, :, :, 1].sum() + trust) / (counts[some, :, :, 2].sum() + trust)
    chance = np.empty(size)
    among = np.zeros(size)  # of a node's children together: one of them is right at most
    for i in range(1, size):
        offered, right, _ = counts[makers[i], min(depths[i], PLACES) - 1, _strength(claims[i])]
        chance[i] = (right + trust * min(claims[i] * honest[makers[i]], 1.0)) / (offered + trust)
        among[parents[i]] += chance[i]
    weights = np.ones(size)
    for i in range(1, size):
        weights[i] = weights[parents[i]] * chance[i] / max(among[parents[i]], 1.0)
    return weights


@compiled
def _weighed(parents, depths, makers, claims, counts, trust):  # type: ignore[no-untyped-def]
    weights = _weigh(parents, depths, makers, claims, counts, trust)
    return weights, ranked(weights)


@compiled
def _learn(tokens, parents, depths, makers, claims, text, counts, keep):  # type: ignore[no-untyped-def]
    node = 0
    for depth in range(len(text)):
        found = -1
        for i in range(node + 1, len(tokens)):
            if parents[i] == node and makers[i]:
                kind = counts[makers[i], min(depths[i], PLACES) - 1, _strength(claims[i])]
                right = tokens[i] == text[depth]
                kind[0] = kind[0] * keep + 1.0
                kind[1] = kind[1] * keep + (1.0 if right else 0.0)
                kind[2] = kind[2] * keep + claims[i]
                if right:
                    found = i
        if found < 0:
            return
        node = found
