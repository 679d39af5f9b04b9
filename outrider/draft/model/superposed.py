"""Superposed decoding: several paths of a draft model for the forwards of one, as a tree of point masses.

arXiv 2405.18400. Lossless: the paths are guesses like any others. The draft model reads a mixture of its drafts' last
tokens (`core/rows/superposed.py`), and n-grams of the sequence's text, or of a corpus, tell the drafts apart. Cost: one
row of the draft model a level, as for a chain; the accepted tokens run once more, since what ran was no draft's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget
from outrider.core.rows.superposed import Drafts, Embed, Grams, Start, Superposition, TextGrams, unroll
from outrider.core.tree import TokenTree, fixed, root
from outrider.draft.model.draft_model import ModelSource

NO_ENDS: frozenset[int] = frozenset()  # a path that has ended is a path; verification knows where text stops


@dataclass(slots=True)
class Superposed(ModelSource):
    """A drafter; what it shares with a source is its draft model's cache."""

    name: str = "superposed"
    shared_noise: bool = False
    embed: Embed | None = None  # of the draft model
    how: Superposition = field(default_factory=Superposition)
    corpus: Grams | None = None  # None: the text of each sequence
    _grams: dict[int, TextGrams] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        ModelSource.begin(self, slot, context)
        self._grams[slot] = TextGrams()

    def end(self, slot: int) -> None:
        self._grams.pop(slot, None)
        ModelSource.end(self, slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        trees = [root(int(self._seats[slot].context.tokens[-1])) for slot in slots]
        fitting = []
        for i, (slot, budget) in enumerate(zip(slots, budgets, strict=True)):
            depth = min(budget.depth, self.target.max_context - len(self._seats[slot].context.tokens))
            if depth > 0:
                fitting.append((i, depth))
        seats = [self._seats[slots[i]] for i, _ in fitting]
        self._catch_up(seats)
        starts = []
        for (i, depth), seat in zip(fitting, seats, strict=True):
            seat.ran, seat.started = None, True
            tokens, grams = seat.context.tokens, self._grams[slots[i]]
            if self.corpus is None:
                grams.read(tokens)
            deepest = max(1, min(depth, self.target.max_rows - len(seat.lead) + 1))
            text = tokens[-len(self.how.orders) :].tolist()
            starts.append(Start(seat.slot, seat.lead, text, self.corpus or grams, deepest))
        if not starts or self.embed is None:
            return Proposals(trees)
        *before, found = unroll(self.target, starts, self.embed, self.how, NO_ENDS)
        for (i, _), drafts in zip(fitting, found, strict=True):
            trees[i] = tree_of(int(trees[i].tokens[0]), drafts, budgets[i], self.name)
        return Proposals(trees, len(before) + 1)


def tree_of(pending: int, drafts: Drafts, budget: Budget, name: str) -> TokenTree:
    """The paths as a trie; where there is too little room, the beginnings that most of the mixture shares."""
    shares: dict[tuple[int, ...], float] = {}
    for path, share in zip(drafts.paths, drafts.weights.tolist(), strict=True):
        for length in range(1, min(len(path), budget.depth) + 1):
            shares[path[:length]] = shares.get(path[:length], 0.0) + share
    kept = sorted(shares, key=lambda path: (-shares[path], len(path)))[: budget.nodes]  # no child before its parent
    place = {(): 0} | {path: at for at, path in enumerate(kept, 1)}
    tokens = np.array([pending, *(path[-1] for path in kept)], dtype=np.int64)
    parents = np.array([-1, *(place[path[:-1]] for path in kept)], dtype=np.int64)
    return fixed(tokens, parents, name, np.array([1.0, *(shares[path] for path in kept)]))
