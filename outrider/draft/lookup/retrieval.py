"""Retrieval: a trie of what followed the longest matching end of the text in a corpus, best candidates first.

Papers: REST (arXiv 2311.08252) for the trie of continuations, infini-gram (arXiv 2401.17377) for matches of any length
with back-off. Where the longest match occurs fewer than `enough` times, matches of half its length join in. Counts of
few occurrences are over-confident, so a ratio is scaled by how often the text went on as some occurrence did, learnt
from what was emitted, by length of the match and number of occurrences; shorter matches share what is left.

Lossless: candidates are point masses. What is learnt is shared between sequences: 144 numbers, no text. Cost: a few
binary searches (the match of the step before is extended where it can be), one pass over at most `rows` continuations
and the trie, all compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, fixed, root

LENGTHS, COUNTS = 12, 6  # buckets of the match's length and of its occurrences
LEVELS = 3  # matches of different lengths in one trie
TRUST = 8.0  # steps that the first guess counts for
FORGET = 0.998


class Match(Protocol):
    """Some tokens and where they occur."""

    @property
    def length(self) -> int: ...
    @property
    def count(self) -> int: ...


class Reach(Protocol):
    """Where a context was found; the next search starts from it."""

    @property
    def match(self) -> Any: ...


class Occurrences(Protocol):
    """A corpus that can be searched."""

    def find(self, query: NDArray[np.int64]) -> Match: ...
    def longest(self, context: NDArray[np.int64]) -> Reach: ...
    def advance(self, reach: Any, context: NDArray[np.int64], fresh: int) -> Reach: ...
    def continuations(self, match: Any, most: int, depth: int) -> NDArray[np.int32]: ...


@dataclass(slots=True)
class _Place:
    """One sequence: how far it is found in the corpus, and what was retrieved for its last step."""

    context: Context
    reach: Reach | None = None
    seen: int = 0  # tokens of the context that `reach` is about
    rows: NDArray[np.int32] | None = None
    lengths: NDArray[np.int64] | None = None  # per row: how long the match before it was


def _first_guess() -> NDArray[np.float64]:
    """[LENGTHS, COUNTS] how often a text goes on as an occurrence did: longer and more frequent matches are surer."""
    length, count = np.arange(LENGTHS)[:, None], np.arange(COUNTS)[None, :]
    return 1 - 1 / (1.3 + 0.35 * length + 0.25 * count)


@dataclass(slots=True)
class Retrieval:
    corpus: Occurrences
    depth: int = 16  # tokens of a continuation
    rows: int = 128  # most occurrences that are looked at
    enough: int = 8  # occurrences below which shorter matches are looked up too (c_min)
    shortest: int = 2  # shortest match that is used
    look_back: int = 64  # longest match that is searched for; one that goes on growing is followed further
    floor: float = 0.02  # candidates less likely than this are left out
    name: str = "retrieval"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _hits: NDArray[np.float64] = field(default_factory=lambda: TRUST * _first_guess())
    _tries: NDArray[np.float64] = field(default_factory=lambda: np.full((LENGTHS, COUNTS), TRUST))
    _slots: dict[int, _Place] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self._slots[slot] = _Place(context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._draft(self._slots[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            place = self._slots[slot]
            if place.rows is not None and place.lengths is not None and record.emitted:
                emitted = np.array(record.emitted, dtype=np.int64)
                _learn(place.rows, place.lengths, emitted, self._hits, self._tries)
                place.rows = place.lengths = None

    def memory(self) -> dict[str, NDArray[Any]]:
        return {"hits": self._hits.copy(), "tries": self._tries.copy()}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        hits, tries = arrays.get("hits"), arrays.get("tries")
        if hits is None or tries is None or hits.shape != (LENGTHS, COUNTS) or tries.shape != hits.shape:
            raise InputError(f"the memory of {self.name} has another shape; start without it")
        if not (np.isfinite(tries).all() and (tries > 0).all() and (hits >= 0).all() and (hits <= tries).all()):
            raise InputError(f"the memory of {self.name} holds no counts; start without it")
        self._hits, self._tries = hits.astype(np.float64), tries.astype(np.float64)

    def forget(self) -> None:
        self._hits, self._tries = TRUST * _first_guess(), np.full((LENGTHS, COUNTS), TRUST)

    def _draft(self, place: _Place, budget: Budget) -> TokenTree:
        pending = int(place.context.tokens[-1])
        place.rows = place.lengths = None
        if budget.nodes < 1 or budget.depth < 1:
            return root(pending)
        rows, lengths = self._retrieve(place, min(self.depth, budget.depth))
        if len(rows) == 0:
            return root(pending)
        place.rows, place.lengths = rows, lengths
        tokens, parents, weights = _trie(
            rows, lengths, pending, budget.nodes, self.floor, self._hits, self._tries
        )  # fmt: skip
        return fixed(tokens, parents, self.name, weights)

    def _retrieve(self, place: _Place, depth: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Continuations of the longest match, and of shorter ones while there are few; each with its match's length."""
        tokens = place.context.tokens
        recent = tokens[-self.look_back :]
        fresh = len(tokens) - place.seen
        if place.reach is None or fresh > len(recent):
            place.reach = self.corpus.longest(recent)
        elif fresh:
            place.reach = self.corpus.advance(place.reach, recent, fresh)
        place.seen = len(tokens)
        match = place.reach.match
        found: list[NDArray[np.int32]] = []
        lengths: list[NDArray[np.int64]] = []
        while match.length >= self.shortest:
            if match.count:
                following = self.corpus.continuations(match, self.rows, depth)
                found.append(following)
                lengths.append(np.full(len(following), match.length))
            half = min(match.length, self.look_back) // 2
            if match.count >= self.enough or len(found) == LEVELS or half < self.shortest:
                break
            match = self.corpus.find(tokens[-half:])
        if len(found) == 1:
            return found[0], lengths[0]
        if not found:
            return np.empty((0, depth), dtype=np.int32), np.empty(0, dtype=np.int64)
        return np.concatenate(found), np.concatenate(lengths)


@compiled
def _bucket(length: int, count: int) -> tuple[int, int]:
    long = length if length < 8 else 8 + min((length - 8) // 8, LENGTHS - 9)
    many = 0
    while count > 1 and many < COUNTS - 1:
        count >>= 1
        many += 1
    return min(long, LENGTHS - 1), many


@compiled
def _level_weights(
    lengths: NDArray[np.int64], hits: NDArray[np.float64], tries: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Per row, its share in the first token: a match gets its trust, what is left goes to the next shorter one."""
    weights = np.empty(len(lengths))
    left, start = 1.0, 0
    while start < len(lengths):
        end = start
        while end < len(lengths) and lengths[end] == lengths[start]:
            end += 1
        long, many = _bucket(lengths[start], end - start)
        trust = hits[long, many] / tries[long, many]
        weights[start:end] = left * trust / (end - start)
        left *= 1 - trust
        start = end
    return weights


@compiled
def _trie(
    rows: NDArray[np.int32], lengths: NDArray[np.int64], pending: int, budget: int, floor: float,
    hits: NDArray[np.float64], tries: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """The best `budget` nodes of the trie of all rows, best first: tokens, parents, weights.

    A node is a range of `order`, the rows that go through it; a child's weight is its parent's times its share of the
    rows' weight, times the trust in so long a match of so many rows below the first level. Weights never rise along a
    path, so taking the best candidate each time takes the best nodes of all.
    """
    count, depth = rows.shape
    shares = _level_weights(lengths, hits, tries)
    order = np.arange(count)
    tokens, parents = np.empty(budget + 1, np.int64), np.empty(budget + 1, np.int64)
    weights = np.empty(budget + 1)
    tokens[0], parents[0], weights[0] = pending, -1, 1.0
    # candidates not yet taken: value, token, parent, depth and range; a taken one has value -1
    most = count * depth + 1
    value, token = np.empty(most), np.empty(most, np.int64)
    parent, level = np.empty(most, np.int64), np.empty(most, np.int64)
    first, last = np.empty(most, np.int64), np.empty(most, np.int64)
    offered = 0
    used, node, at, low, high = 1, 0, 0, 0, count
    while used <= budget:
        # the children of `node`: its rows by their token at depth `at`
        if at < depth:
            _sort(order, rows, low, high, at)
            total, longest = 0.0, 0
            for i in range(low, high):
                total += shares[order[i]]
                longest = max(longest, lengths[order[i]])
            if at == 0:
                scale = 1.0
            else:
                long, many = _bucket(longest + at, high - low)
                scale = weights[node] / total * hits[long, many] / tries[long, many]
            i = low
            while i < high:
                here, share, start = rows[order[i], at], 0.0, i
                while i < high and rows[order[i], at] == here:
                    share += shares[order[i]]
                    i += 1
                if here >= 0 and share * scale >= floor:
                    value[offered], token[offered], parent[offered] = share * scale, here, node
                    level[offered], first[offered], last[offered] = at + 1, start, i
                    offered += 1
        best = -1
        for c in range(offered):
            if value[c] > 0 and (best < 0 or value[c] > value[best]):
                best = c
        if best < 0:
            break
        node = used
        tokens[node], parents[node], weights[node] = token[best], parent[best], value[best]
        at, low, high = level[best], first[best], last[best]
        value[best] = -1.0
        used += 1
    return tokens[:used], parents[:used], weights[:used]


@compiled
def _sort(order: NDArray[np.int64], rows: NDArray[np.int32], low: int, high: int, at: int) -> None:
    """Orders a range by the token at one depth, stable; the rows of one match are in order already."""
    for i in range(low + 1, high):
        row = order[i]
        token = rows[row, at]
        j = i
        while j > low and rows[order[j - 1], at] > token:
            order[j] = order[j - 1]
            j -= 1
        order[j] = row


@compiled
def _learn(
    rows: NDArray[np.int32], lengths: NDArray[np.int64], emitted: NDArray[np.int64],
    hits: NDArray[np.float64], tries: NDArray[np.float64],
) -> None:  # fmt: skip
    """Notes at each depth whether the text went on as one of the rows did that agreed with it so far. Changes both."""
    start = 0
    while start < len(lengths):  # the first token: each match by itself
        end, hit = start, False
        while end < len(lengths) and lengths[end] == lengths[start]:
            hit |= rows[end, 0] == emitted[0]
            end += 1
        _note(lengths[start], end - start, hit, hits, tries)
        start = end
    alive = rows[:, 0] == emitted[0]
    for d in range(1, min(len(emitted), rows.shape[1])):
        count, longest, hit = 0, 0, False
        for r in range(len(rows)):
            if alive[r]:
                count += 1
                longest = max(longest, lengths[r])
                alive[r] = rows[r, d] == emitted[d]
                hit |= alive[r]
        if count == 0:
            break
        _note(longest + d, count, hit, hits, tries)


@compiled
def _note(length: int, count: int, hit: bool, hits: NDArray[np.float64], tries: NDArray[np.float64]) -> None:
    long, many = _bucket(length, count)
    hits[long, many] = hits[long, many] * FORGET + hit
    tries[long, many] = tries[long, many] * FORGET + 1
