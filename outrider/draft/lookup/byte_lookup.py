"""Byte lookup: copy what followed an earlier occurrence of the last bytes of the text, and say it in target tokens.

OmniDraft's translation (arXiv 2507.02659) without its model: the draft speaks bytes, the n-gram cache knows which runs
of bytes the target says in one token. Unlike a lookup of tokens it finds text that was tokenised otherwise before.
Lossless: candidates are point masses. Cost: one table entry a byte and order; a proposal is a look-up for each order
and one for each byte translated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, chain
from outrider.draft.model.ngram_cache import NgramCache, cache_for, translate
from outrider.draft.model.vocabulary_map import BYTES, VocabularyMap

ORDERS = np.array([24, 12, 6], dtype=np.int64)  # lengths of the suffixes that are looked up, longest first
TOKEN = 12  # bytes that are copied for each token wanted


@dataclass(slots=True)
class _Text:
    """One sequence as bytes, and where each short stretch of it was last seen."""

    context: Context
    cache: NgramCache
    bytes: NDArray[np.uint8] = field(default_factory=lambda: np.empty(4096, dtype=np.uint8))
    places: NDArray[np.int32] = field(default_factory=lambda: np.zeros((len(ORDERS), 8192), dtype=np.int32))
    size: int = 0
    seen: int = 0  # tokens taken up
    known: set[int] = field(default_factory=set)  # tokens of this text that the cache was told of


@dataclass(slots=True)
class ByteLookup:
    pieces: Sequence[bytes]  # of the target's tokens
    memory_bytes: int = 4 << 20
    private: bool = False  # what is learnt serves its own request only
    name: str = "omnidraft-ngram"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    mapped: VocabularyMap = field(init=False)
    cache: NgramCache = field(init=False)
    _slots: dict[int, _Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mapped = VocabularyMap(self.pieces, BYTES)
        self.cache = cache_for(self.mapped, self.memory_bytes)

    def begin(self, slot: int, context: Context) -> None:
        cache = NgramCache(self.cache.vocabularies, self.memory_bytes) if self.private else self.cache
        self._slots[slot] = _Text(context, cache)
        self._take_up(self._slots[slot])

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._copy(self._slots[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot in slots:
            self._take_up(self._slots[slot])

    def memory(self) -> dict[str, NDArray[Any]]:
        return self.cache.memory()

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.cache.remember(arrays)

    def forget(self) -> None:
        self.cache.forget()
        for text in self._slots.values():
            text.known.clear()

    def _take_up(self, text: _Text) -> None:
        new = text.context.tokens[text.seen :].tolist()
        text.seen += len(new)
        for token in dict.fromkeys(new):
            if token not in text.known and len(piece := self._piece(token)) > 1:
                text.known.add(token)
                text.cache.learn(token, list(piece))
        added = np.frombuffer(b"".join(map(self._piece, new)), dtype=np.uint8)
        before, text.size = text.size, text.size + len(added)
        if text.size > len(text.bytes):  # the tables grow with the text: about two entries a byte and order
            room = 1 << (2 * text.size - 1).bit_length()
            text.bytes = np.concatenate([text.bytes[:before], np.empty(room - before, dtype=np.uint8)])
            text.places = np.zeros((len(ORDERS), 2 * room), dtype=np.int32)
            _index(text.bytes, 0, before, ORDERS, text.places)
        text.bytes[before : text.size] = added
        _index(text.bytes, before, text.size, ORDERS, text.places)

    def _piece(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def _copy(self, text: _Text, budget: Budget) -> TokenTree:
        pending, length = int(text.context.tokens[-1]), min(budget.nodes, budget.depth)
        place = _find(text.bytes, text.size, ORDERS, text.places)
        if place == 0:
            return chain(pending, ())
        # A match that reaches the end of the text goes on copying its own copy: a loop continues as a loop.
        copied = np.resize(text.bytes[place : text.size], TOKEN * length)
        tokens = translate(copied.tolist(), self.mapped, text.cache, ended=False)
        return chain(pending, tokens[:length], origin=self.name)


@compiled
def _hash(text: NDArray[np.uint8], end: int, order: int) -> int:
    h = np.uint64(14695981039346656037)
    for i in range(end - order, end):
        h = (h ^ np.uint64(text[i])) * np.uint64(1099511628211)
    return int((h ^ (h >> np.uint64(29))) >> np.uint64(1))


@compiled
def _index(text: NDArray[np.uint8], begin: int, end: int, orders: NDArray[np.int64], places: NDArray[np.int32]) -> None:
    """Remember where each stretch ended last, for ends begin .. end - 1: the newest has nothing after it yet."""
    for row in range(len(orders)):
        for at in range(max(begin, orders[row]), end):
            places[row, _hash(text, at, orders[row]) & (places.shape[1] - 1)] = at


@compiled
def _find(text: NDArray[np.uint8], size: int, orders: NDArray[np.int64], places: NDArray[np.int32]) -> int:
    """Where the longest of these suffixes ended before, or 0."""
    for row in range(len(orders)):
        order = orders[row]
        if size < order:
            continue
        at = places[row, _hash(text, size, order) & (places.shape[1] - 1)]
        if at > 0:
            same = True
            for i in range(1, order + 1):
                if text[at - i] != text[size - i]:
                    same = False
                    break
            if same:
                return at
    return 0
