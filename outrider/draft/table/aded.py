"""ADED: a tri-gram table that leans towards the text being written, searched for the prefixes worth a draft.

Paper: Liu et al. (arXiv 2407.12021). Lossless: candidates are point masses. The table starts from a corpus or empty;
before every draft each tri-gram of the last 16 tokens gains 0.04, up to 3, so values are weights and no probabilities.
Cost: about 140 bytes a pair of tokens, a hundred microseconds of search a step, nothing of the target's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, fixed, root
from outrider.draft.table.ngram_table import Table, claim, clear, find, new_owner, new_table, restore, size, stored
from outrider.draft.table.odds import Odds, count_offer, new_odds, reset, restore_odds, stored_odds
from outrider.draft.table.puct import Settings, most_visited, pair_key, search

SUCCESSORS = 12
WINDOW = 16  # tokens whose tri-grams are raised before a draft
GAIN, CAP = 0.04, 3.0


@dataclass(slots=True)
class _Seat:
    context: Context
    owner: int


@dataclass(slots=True)
class Aded:
    """`corpus` is what `corpus_table` made. `scope` private: a sequence raises copies of its own."""

    vocab_size: int
    settings: Settings = field(default_factory=Settings)
    adapt: bool = True
    learn_prompt: bool = True
    scope: Literal["shared", "private"] = "shared"
    memory_bytes: int = 64 << 20
    corpus: Mapping[str, NDArray[Any]] | None = None
    name: str = "aded"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _table: Table = field(init=False)
    _odds: Odds = field(default_factory=lambda: new_odds(1, trust=0.5))
    _seats: dict[int, _Seat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._table = new_table(self.memory_bytes, SUCCESSORS)
        self.forget()

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def begin(self, slot: int, context: Context) -> None:
        seat = self._seats[slot] = _Seat(context, new_owner(self.scope, context.prompt))
        if self.learn_prompt:
            raise_weights(self._table, seat.owner, context.tokens)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._grow(self._seats[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            seat = self._seats[slot]
            tokens = seat.context.tokens
            _count_offers(self._table, self._odds, seat.owner, tokens[max(len(tokens) - len(record.emitted) - 2, 0) :])
            if self.adapt:
                raise_weights(self._table, seat.owner, tokens[-WINDOW:])

    def memory(self) -> dict[str, NDArray[Any]]:
        return {**stored(self._table), **stored_odds(self._odds)}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        restore(self._table, arrays, self.vocab_size, largest=CAP + 1e-3)
        restore_odds(self._odds, arrays)

    def forget(self) -> None:
        """Back to the corpus, or to nothing."""
        clear(self._table)
        reset(self._odds)
        if self.corpus is not None:
            restore(self._table, self.corpus, self.vocab_size, largest=CAP + 1e-3)

    def _grow(self, seat: _Seat, budget: Budget) -> TokenTree:
        tokens = seat.context.tokens
        if len(tokens) < 2:
            return root(int(tokens[-1]))
        before, pending = int(tokens[-2]), int(tokens[-1])
        found = search(self._table, seat.owner, before, pending, self.settings, len(tokens))
        grown = most_visited(self._table, seat.owner, self._odds, found, budget.nodes, budget.depth)
        return fixed(*grown[:2], self.name, grown[2])


def corpus_table(tokens: NDArray[np.int64], vocab_size: int) -> dict[str, NDArray[Any]]:
    """P[(a, b)][c] = count / sum over all tri-grams, the 12 likeliest of each pair, not renormalised.

    In the form that `remember` takes, the rarest pair first, so that what does not fit the memory is the rarest.
    """
    codes, counts = np.unique((tokens[:-2] * vocab_size + tokens[1:-1]) * vocab_size + tokens[2:], return_counts=True)
    pairs, first, inverse = np.unique(codes // vocab_size, return_index=True, return_inverse=True)
    sums = np.bincount(inverse, weights=counts)
    order = np.lexsort((codes, -counts, inverse))
    rank = np.arange(len(codes)) - first[inverse]  # codes are sorted by pair, and so is `order`
    kept = rank < SUCCESSORS
    ids = np.full((len(pairs), SUCCESSORS), -1, dtype=np.int32)
    values = np.zeros((len(pairs), SUCCESSORS), dtype=np.float32)
    at = (inverse[kept], rank[kept])
    ids[at] = (codes % vocab_size)[order][kept]
    values[at] = (counts / sums[inverse])[order][kept]
    keys = np.stack([np.zeros_like(pairs), ((pairs // vocab_size + 1) << 32) | (pairs % vocab_size + 1)], axis=1)
    rarest = np.argsort(sums, kind="stable")
    seen = sums[rarest].astype(np.int32)
    odds = stored_odds(new_odds(1))
    return {"keys": keys[rarest], "ids": ids[rarest], "values": values[rarest], "counts": seen, **odds}


@compiled
def raise_weights(table: Table, owner: int, tokens: NDArray[np.int64]) -> None:
    """Changes state: every tri-gram of the text gains; a new one starts at 0. Rows stay sorted, the newest of equals
    first; in a full row a new successor takes the least one's place if it would weigh no less."""
    for i in range(2, len(tokens)):
        entry = claim(table, owner, 0, pair_key(tokens[i - 2], tokens[i - 1]))
        count = size(table, entry)
        at = 0
        while at < count and table.ids[entry, at] != tokens[i]:
            at += 1
        if at == count:
            if count == table.ids.shape[1]:
                if table.values[entry, count - 1] > GAIN:
                    continue
                at = count - 1
            table.ids[entry, at] = tokens[i]
            table.values[entry, at] = 0.0
        value = min(CAP, table.values[entry, at] + GAIN)
        while at > 0 and table.values[entry, at - 1] <= value:
            table.ids[entry, at] = table.ids[entry, at - 1]
            table.values[entry, at] = table.values[entry, at - 1]
            at -= 1
        table.ids[entry, at] = tokens[i]
        table.values[entry, at] = value
        table.counts[entry] = min(table.counts[entry] + 1, 1 << 30)


@compiled
def _count_offers(table: Table, odds: Odds, owner: int, tokens: NDArray[np.int64]) -> None:
    for i in range(2, len(tokens)):
        entry = find(table, owner, 0, pair_key(tokens[i - 2], tokens[i - 1]))
        if entry < 0:
            continue
        total = 0.0
        for rank in range(size(table, entry)):
            total += table.values[entry, rank]
        for rank in range(size(table, entry)):
            count_offer(odds, 0, rank, table.values[entry, rank] / total, table.ids[entry, rank] == tokens[i])
