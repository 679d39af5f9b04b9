"""Suffix: continue as the longest matching passages went on, in the request itself and in finished requests.

Papers: SAM-Decoding (arXiv 2411.10666) and SuffixDecoding (arXiv 2411.04975). Lossless: candidates are point masses.
Every node of the tree knows its longest match in each index and the next shorter one; each says how often a token came
next, and how often such a (match length, occurrences, share) was right so far turns that into the node's weight. Cost:
O(1) amortised a token to index, O(`max_depth`) a proposal, whatever the length of the texts.
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
from outrider.core.tree import TokenTree, fixed, root
from outrider.draft.lookup.suffix_index import (
    BYTES_PER_TOKEN,
    COUNT,
    LATEST,
    LENGTH,
    LINK,
    READ,
    TO,
    TOKEN,
    TOP,
    WIDTH,
    SuffixIndex,
    earlier,
    match,
    shorten,
    step,
)

_BYTES = BYTES_PER_TOKEN + 4  # the index and the tokens themselves
_LEAST = 1024  # tokens that each half of the memory must hold
LEAST_BYTES = 2 * _LEAST * _BYTES
_SPARE = 1024  # tokens a request may grow before its index is made anew, twice as large

_LEVELS = 2  # match lengths that are asked at each node, longest first; more find nothing better
_LENGTHS, _COUNTS, _SHARES = 9, 3, 6  # classes of evidence
_CELLS = 2 * _LENGTHS * _COUNTS * _SHARES
_PRIOR = 6.0  # observations that the first guess of a class counts for
_HORIZON = 1000.0  # observations after which old ones fade

Evidence = NDArray[np.float64]  # [cells, 2]: accepted, offered


def check_room(memory_bytes: int) -> None:
    """Refuse so few bytes that hardly a request fits."""
    if memory_bytes < LEAST_BYTES:
        raise InputError(
            f"option memory_bytes is {memory_bytes}, too few to remember requests; use {LEAST_BYTES} or more"
        )


@dataclass(slots=True)
class _Request:
    context: Context
    index: SuffixIndex
    proposed: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = (
        None  # tokens, parents and evidence classes of the last tree
    )

    def catch_up(self) -> None:
        tokens = self.context.tokens
        if len(tokens) > self.index.capacity:
            self.index = SuffixIndex(2 * len(tokens), self.index.depth)
        self.index.extend(tokens[len(self.index) :])


@dataclass(slots=True)
class _Past:
    """Half of the memory of finished requests."""

    index: SuffixIndex
    requests: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, tokens: NDArray[np.int64]) -> None:
        self.index.separate()
        self.index.extend(tokens)
        self.requests.append(tokens.astype(np.int32))


class Suffix:
    """`shared` keeps finished requests for later ones, in at most `memory_bytes`: two halves, of which the older is
    dropped whole when the younger is full, so the oldest requests go first and nothing is ever deleted piecemeal."""

    name = "suffix"
    shared_noise = False

    def __init__(self, max_depth: int = 64, memory_bytes: int = 64 << 20, shared: bool = True) -> None:
        if shared:
            check_room(memory_bytes)
        if max_depth < 2:
            raise InputError(f"option max_depth is {max_depth}; use 2 or more")
        self.max_depth, self.shared = max_depth, shared
        self.capacity = memory_bytes // 2 // _BYTES if shared else 0  # tokens of each half
        self.needs = Needs()
        self._slots: dict[int, _Request] = {}
        self.forget()

    def begin(self, slot: int, context: Context) -> None:
        request = _Request(context, SuffixIndex(2 * len(context.tokens) + _SPARE, self.max_depth))
        request.catch_up()
        self._slots[slot] = request

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        request = self._slots.pop(slot, None)
        if request is not None and self.shared and request.context.output:
            # What the model said, and enough of the prompt to recognise where it began.
            kept = len(request.context.output) + self.max_depth
            self._add(request.context.tokens[-min(kept, self.capacity) :])

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._tree(self._slots[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            request = self._slots[slot]
            if request.proposed is not None:
                learn(self._evidence, *request.proposed, np.array(record.emitted, dtype=np.int64))
                request.proposed = None
            request.catch_up()

    def confidence(self, slot: int) -> int:
        """Tokens of the longest match now, the pending one included. Changes nothing."""
        request = self._slots[slot]
        tail = request.context.tokens[1 - self.max_depth :]
        matches = [
            earlier(request.index.arrays, self.max_depth - 1),
            *(match(p.index.arrays, tail) for p in self._past),
        ]
        return max(length for _, length in matches)

    def memory(self) -> dict[str, NDArray[Any]]:
        requests = [tokens for past in self._past for tokens in past.requests]
        return {
            "tokens": np.concatenate([*requests, np.empty(0, dtype=np.int32)]),
            "ends": np.cumsum([len(tokens) for tokens in requests], dtype=np.int64),
            "evidence": self._evidence.copy(),
        }

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        tokens, ends, evidence = _checked(arrays)
        self.forget()
        self._evidence = evidence
        for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
            if self.shared:
                self._add(tokens[start:end][-self.capacity :].astype(np.int64))

    def forget(self) -> None:
        self._past = [_Past(SuffixIndex(0, self.max_depth)), _Past(SuffixIndex(self.capacity, self.max_depth))]
        self._evidence = first_guess()

    def _add(self, tokens: NDArray[np.int64]) -> None:
        if len(tokens) > self._past[1].index.room:
            self._past = [self._past[1], _Past(SuffixIndex(self.capacity, self.max_depth))]
        self._past[1].add(tokens)

    def _tree(self, request: _Request, budget: Budget) -> TokenTree:
        context = request.context.tokens
        indexes = (request.index.arrays, self._past[0].index.arrays, self._past[1].index.arrays)
        tokens, parents, weights, cells = grow(
            indexes, context[1 - self.max_depth :], self._evidence, budget.nodes, budget.depth, self.max_depth
        )
        if len(tokens) == 1:
            return root(int(tokens[0]))
        request.proposed = tokens, parents, cells
        return fixed(tokens, parents, self.name, weights)


@compiled
def grow(indexes, tail, evidence, nodes, deepest, depth):  # type: ignore[no-untyped-def]
    """The `nodes` likeliest continuations of `tail`: tokens, parents, weights, evidence classes."""
    count = len(indexes)
    tokens, parents = np.empty(nodes + 1, np.int64), np.empty(nodes + 1, np.int64)
    weights, cells = np.empty(nodes + 1, np.float64), np.empty(nodes + 1, np.int64)
    depths = np.zeros(nodes + 1, np.int64)
    places = np.zeros((nodes + 1, count, 2), np.int64)  # state and length of the longest match in each index
    # The best candidates not yet in the tree, worst first; never more than can still be taken.
    waiting, size = np.empty((nodes, 3), np.int64), 0  # parent, token, class
    worth = np.empty(nodes, np.float64)
    found, guess, size_found = np.empty((count * _LEVELS * WIDTH, 2), np.int64), np.empty(count * _LEVELS * WIDTH), 0
    tokens[0], parents[0], weights[0], cells[0] = tail[-1], -1, 1.0, -1
    places[0, 0] = earlier(indexes[0], depth - 1)
    for i in range(1, count):
        places[0, i] = match(indexes[i], tail)
    node, made = 0, 1
    while True:
        if depths[node] < deepest:
            size_found = 0
            for i in range(count):
                size_found = _continuations(indexes[i], places[node, i], i == 0, evidence, found, guess, size_found)
            for j in range(size_found):
                weight, room = weights[node] * guess[j], nodes + 1 - made
                if size == room:
                    if weight <= worth[0]:
                        continue
                    for k in range(size - 1):
                        worth[k], waiting[k] = worth[k + 1], waiting[k + 1]
                    size -= 1
                k = size
                while k > 0 and worth[k - 1] >= weight:  # equals: the earlier one is taken first
                    worth[k], waiting[k] = worth[k - 1], waiting[k - 1]
                    k -= 1
                worth[k] = weight
                waiting[k, 0], waiting[k, 1], waiting[k, 2] = node, found[j, 0], found[j, 1]
                size += 1
        if size == 0 or made > nodes:
            return tokens[:made], parents[:made], weights[:made], cells[:made]
        size -= 1
        parent = waiting[size, 0]
        tokens[made], parents[made], weights[made] = waiting[size, 1], parent, worth[size]
        cells[made], depths[made] = waiting[size, 2], depths[parent] + 1
        for i in range(count):
            state, length = step(indexes[i], places[parent, i, 0], places[parent, i, 1], tokens[made])
            if length == depth:  # one token more could not be counted
                length -= 1
                state = shorten(indexes[i][0], state, length)
            places[made, i, 0], places[made, i, 1] = state, length
        node = made
        made += 1
        if size > nodes + 1 - made:  # what can still be taken has become less
            for k in range(size - 1):
                worth[k], waiting[k] = worth[k + 1], waiting[k + 1]
            size -= 1


@compiled
def _continuations(index, longest, running, evidence, found, guess, size):  # type: ignore[no-untyped-def]
    """Add what followed the match and its shorter suffixes; a token found before keeps the better guess.

    A match that reaches the end of the request's own text has nothing behind it: its next shorter suffix is where the
    text began to repeat, so a loop continues as a loop.
    """
    states, edges, _, marks = index
    state, length = longest
    level = 0
    while state and level < _LEVELS:
        total = states[state, COUNT]
        if running and states[state, LATEST] == marks[READ]:
            total -= 1  # the occurrence at the end of the text has no continuation yet
        for i in range(TOP, TOP + WIDTH):
            edge = states[state, i] - 1
            if edge < 0:
                break
            cell = classify(running, length, total, states[edges[edge, TO], COUNT])
            chance = evidence[cell, 0] / evidence[cell, 1]
            j = 0
            while j < size and found[j, 0] != edges[edge, TOKEN]:
                j += 1
            if j == size:
                size += 1
                found[j, 0], guess[j] = edges[edge, TOKEN], -1.0
            if chance > guess[j]:
                found[j, 1], guess[j] = cell, chance
        level += total > 0
        state = states[state, LINK]
        length = states[state, LENGTH]
    return size


@compiled
def classify(running: bool, length: int, total: int, count: int) -> int:
    """The class of "followed `count` of `total` times a match of `length` tokens"."""
    long = length - 1 if length <= 4 else 4 if length <= 6 else 5 if length <= 10 else 6 if length <= 20 else 7
    if length >= 40:
        long = 8
    often = 0 if total == 1 else 1 if total <= 3 else 2
    share = min(int(count * _SHARES / total), _SHARES - 1)
    return ((running * _LENGTHS + long) * _COUNTS + often) * _SHARES + share


@compiled
def learn(evidence, tokens, parents, cells, emitted):  # type: ignore[no-untyped-def]
    """Count, for each node whose parent became text, whether it did too."""
    node = 0
    for token in emitted:
        follows = -1
        for i in range(node + 1, len(tokens)):
            if parents[i] == node:
                right = tokens[i] == token
                cell = cells[i]
                if evidence[cell, 1] > _HORIZON:
                    evidence[cell] *= 0.5
                evidence[cell, 0] += right
                evidence[cell, 1] += 1.0
                if right:
                    follows = i
        if follows < 0:
            return
        node = follows


def first_guess() -> Evidence:
    """A share of the occurrences, trusted the more the longer the match, the more often it was seen, and at home."""
    evidence = np.empty((2, _LENGTHS, _COUNTS, _SHARES, 2))
    lengths = np.array([1, 2, 3, 4, 5.5, 8.5, 15, 30, 50]).reshape(-1, 1, 1)
    doubt = np.array([[8, 5, 4], [1.6, 0.5, 0.3]]).reshape(2, 1, _COUNTS, 1)  # finished requests, then the running one
    share = (np.arange(_SHARES) + 0.5) / _SHARES * 0.6  # a rival continuation is worse news than its count
    share[-1] = 0.97
    evidence[..., 1] = _PRIOR
    evidence[..., 0] = _PRIOR * share * lengths / (lengths + doubt)
    return evidence.reshape(_CELLS, 2)


def _checked(arrays: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.int32], NDArray[np.int64], Evidence]:
    try:
        tokens = np.asarray(arrays["tokens"]).astype(np.int32)
        ends = np.asarray(arrays["ends"]).astype(np.int64)
        evidence = np.array(arrays["evidence"], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise InputError("this is not a memory of the suffix drafter; remove it or name another file") from None
    whole = tokens.ndim == ends.ndim == 1 and bool((np.diff(ends, prepend=0) > 0).all())
    if not whole or (ends[-1] if len(ends) else 0) != len(tokens) or (len(tokens) and tokens.min() < 0):
        raise InputError("the remembered requests of the suffix drafter do not fit together; remove the file")
    shapely = evidence.shape == (_CELLS, 2) and bool(np.isfinite(evidence).all() and (evidence[:, 1] > 0).all())
    if not shapely or not bool(((evidence[:, 0] > 0) & (evidence[:, 0] < evidence[:, 1])).all()):
        raise InputError("the remembered evidence of the suffix drafter is of another version; remove the file")
    return tokens, ends, evidence
