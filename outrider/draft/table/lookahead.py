"""Lookahead: the target runs ahead on a window of guesses, and the n-grams it writes there are proposed when they fit.

Lookahead decoding (arXiv 2402.02057). Besides the candidates to verify, every step carries W *columns*, each a run of
N - 1 tokens that the target continues by one token a step; a column and its new token are an n-gram, pooled by its
first token. Up to G n-grams of the pool that begin with the pending token are proposed. As a token tree: the
columns' first tokens form a chain below the pending token, and column j's other tokens hang on its first one, at depths
j + 1 .. j + N - 1. So a node sees exactly what the paper's mask shows it, at the paper's position, and a column that
happens to be right is accepted like any other candidate.

Lossless: all candidates are point masses. The pool may be shared by all requests or private to each, is bounded in
bytes, and also takes the n-grams of the text itself (`text`). Cost: (W + G)(N - 1) rows a step where plain decoding has
one, most of them to mine n-grams rather than to be accepted: it pays only where rows are nearly free, as on a GPU that
waits for memory, and a controller that watches the cost will otherwise leave little of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import NOTHING, TokenTree, fixed
from outrider.draft.table.ngram_pool import NgramPool
from outrider.draft.table.places import places
from outrider.draft.table.top_rows import likeliest

RECENT = 512  # tokens of the text from which new columns are copied
POOL, WINDOW = 0, 1  # what a node is: a proposed n-gram, or a column
DEPTHS = 32  # depths at which acceptance is told apart
_KEEP = 0.99  # how fast old steps are forgotten in the estimate of acceptance


@dataclass(slots=True)
class _Proposal:
    """The arrays of one tree. `tips` are the last nodes of the columns that are in it."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    kinds: NDArray[np.int64]
    weights: NDArray[np.float64]
    tips: NDArray[np.int64]


@dataclass(slots=True)
class _Slot:
    context: Context
    pool: NgramPool
    columns: NDArray[np.int64]  # [W, N - 1]
    pooled: int = 0  # tokens of the text whose n-grams are in the pool
    made: int = 0  # columns made so far: each begins elsewhere in the text
    proposal: _Proposal | None = None  # None: nothing of ours runs in this step


@dataclass(slots=True)
class Lookahead:
    window: int = 4  # W
    ngram: int = 4  # N
    guesses: int = 4  # G
    text: bool = True
    shared: bool = False  # one pool for all requests
    limit: int = 4 << 20  # bytes of a pool
    name: str = "lookahead"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _pool: NgramPool | None = field(init=False)  # the shared one
    _slots: dict[int, _Slot] = field(default_factory=dict)
    # [kind, depth, (tried, accepted)]: among nodes whose parent was accepted. Columns are there to be continued: until
    # seen otherwise one in twenty is right, against one in five proposed n-grams.
    _counts: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._pool = self._new_pool() if self.shared else None
        self._counts = np.empty((2, DEPTHS, 2))
        self._counts[POOL], self._counts[WINDOW] = (4.0, 0.8), (4.0, 0.2)

    def begin(self, slot: int, context: Context) -> None:
        pool = self._new_pool() if self._pool is None else self._pool
        state = _Slot(context, pool, np.empty((0, self.ngram - 1), dtype=np.int64))
        self._slots[slot] = state
        self._learn_text(state)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals(
            [self._propose(self._slots[slot], budget) for slot, budget in zip(slots, budgets, strict=True)]
        )

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            state = self._slots[slot]
            proposal, state.proposal = state.proposal, None
            if proposal is not None:
                tree, path = record.tree, record.verdict.path
                where = places(proposal.tokens, proposal.parents, tree.tokens, tree.parents)
                accepted = np.isin(where, (0, *path))
                _count(proposal.parents, proposal.kinds, accepted, self._counts, _KEEP)
                self._slide(state, record, where[proposal.tips], record.gain)
            self._learn_text(state)

    def memory(self) -> dict[str, NDArray[Any]]:
        """The shared pool; nothing where pools are private."""
        return {} if self._pool is None else {"ngrams": self._pool.all()}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if not arrays:
            return
        grams = arrays.get("ngrams")
        if self._pool is None:
            raise InputError("this memory is a shared n-gram pool and the pools are private; set scope=shared")
        if grams is None or grams.ndim != 2 or grams.dtype.kind != "i" or (grams.size and grams.min() < 0):
            raise InputError("this memory holds no n-grams; it was saved by another method")
        if grams.shape[1] != self.ngram:
            raise InputError(f"this memory holds n-grams of {grams.shape[1]} tokens; set ngram={grams.shape[1]}")
        self._pool.clear()
        self._pool.add(np.ascontiguousarray(grams, dtype=np.int64))

    def forget(self) -> None:
        if self._pool is not None:
            self._pool.clear()

    def _new_pool(self) -> NgramPool:
        return NgramPool(self.ngram, self.guesses, self.limit)

    def _propose(self, state: _Slot, budget: Budget) -> TokenTree:
        """The n-grams first, then as many whole columns as fit: half a column would yield no n-gram."""
        text = state.context.tokens
        missing = self.window - len(state.columns)
        if missing > 0:
            fresh = _pieces(text[-RECENT:], state.made, missing, self.ngram - 1)
            state.columns = np.concatenate([state.columns, fresh])
            state.made += missing
        pending = int(text[-1])
        grams = state.pool.find(pending, self.guesses)
        made = _Proposal(*_build(pending, grams, state.columns, budget.nodes, budget.depth, self._counts))
        state.proposal = made
        return fixed(made.tokens, made.parents, self.name, made.weights)

    def _slide(self, state: _Slot, record: StepRecord, tips: NDArray[np.int64], gain: int) -> None:
        """Columns that ran grow by the target's token and lose their first one; those that the text overtook leave."""
        logits = record.scores.logits
        assert logits is not None
        ran = len(tips) if len(tips) == 0 or tips[-1] != NOTHING else int((tips == NOTHING).argmax())
        grown = state.columns[:0]
        if ran:
            rows = likeliest(logits, tips[:ran])
            grams = np.concatenate([state.columns[:ran], rows[:, None]], axis=1)  # [ran, N]
            state.pool.add(grams)
            grown = grams[gain - 1 :, 1:]
        state.columns = np.concatenate([grown, state.columns[ran:]])

    def _learn_text(self, state: _Slot) -> None:
        tokens = state.context.tokens
        if self.text:
            state.pool.add_text(tokens, state.pooled)
        state.pooled = len(tokens)


@compiled
def _pieces(text: NDArray[np.int64], made: int, count: int, length: int) -> NDArray[np.int64]:
    """[count, length] stretches of the text, begun at scattered places; short texts are read round and round."""
    size = len(text)
    starts = max(size - length, 1)
    out = np.empty((count, length), dtype=np.int64)
    for i in range(count):
        start = (((made + i + 1) * 2654435761) >> 7) % starts
        for k in range(length):
            out[i, k] = text[(start + k) % size]
    return out


@compiled
def _child(tokens: NDArray[np.int64], parents: NDArray[np.int64], size: int, node: int, token: int) -> int:
    for i in range(node + 1, size):
        if parents[i] == node and tokens[i] == token:
            return i
    return -1


@compiled
def _build(  # type: ignore[no-untyped-def]
    pending: int, grams: NDArray[np.int64], columns: NDArray[np.int64], nodes: int, depth: int,
    counts: NDArray[np.float64],
):  # fmt: skip
    """Tokens, parents, kinds, weights and tips of the tree: n-grams cut to what fits, then whole columns."""
    length = columns.shape[1]
    nodes = min(nodes, (len(grams) + len(columns)) * length)
    tokens = np.empty(nodes + 1, dtype=np.int64)
    parents = np.empty(nodes + 1, dtype=np.int64)
    kinds = np.zeros(nodes + 1, dtype=np.int64)
    tokens[0], parents[0], size = pending, -1, 1
    for i in range(len(grams)):
        node = 0
        for k in range(min(length, depth)):
            child = _child(tokens, parents, size, node, grams[i, k])
            if child < 0:
                if size > nodes:
                    break
                child = size
                tokens[child], parents[child], kinds[child] = grams[i, k], node, POOL
                size += 1
            node = child
    tips = np.empty(len(columns), dtype=np.int64)
    ran, first = 0, 0
    for j in range(len(columns)):
        if j + length > depth or size + length > nodes + 1:
            break
        node = first
        for k in range(length):
            child = _child(tokens, parents, size, node, columns[j, k])
            if child < 0:
                child = size
                tokens[child], parents[child], kinds[child] = columns[j, k], node, WINDOW
                size += 1
            node = child
            if k == 0:
                first = node
        tips[j] = node
        ran += 1
    weights = np.ones(size)
    depths = np.zeros(size, dtype=np.int64)
    for i in range(1, size):
        depths[i] = depths[parents[i]] + 1
        tried, accepted = counts[kinds[i], min(depths[i], len(counts[0])) - 1]
        weights[i] = weights[parents[i]] * accepted / tried
    return tokens[:size], parents[:size], kinds[:size], weights, tips[:ran]


@compiled
def _count(
    parents: NDArray[np.int64], kinds: NDArray[np.int64], accepted: NDArray[np.bool_], counts: NDArray[np.float64],
    keep: float,
) -> None:  # fmt: skip
    depths = np.zeros(len(parents), dtype=np.int64)
    for i in range(1, len(parents)):
        depths[i] = depths[parents[i]] + 1
        if accepted[parents[i]]:
            count = counts[kinds[i], min(depths[i], len(counts[0])) - 1]
            count[0] = count[0] * keep + 1.0
            count[1] = count[1] * keep + (1.0 if accepted[i] else 0.0)
