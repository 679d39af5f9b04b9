"""An FM-index over a corpus of documents, turned around, so that a text grows at its right end by one step.

Paper: SEAL (arXiv 2204.10628). The rows are the suffixes of the reversed tokens, sorted; those that begin with a
reversed text stand together, and a token behind it narrows them by two counts in the wavelet matrix of what precedes
each suffix: which, turned around, is what follows the text. Counts, next tokens, places and the text itself come from
there; the corpus is not kept beside it. A text never crosses a document's border. Read-only, and exact.

Symbols: 0 closes the whole, 1 closes a document, 2 and more are the tokens that occur, in the order of their ids.
Space: a bit a token for each doubling of distinct tokens, a sixteenth of that, and 0.26 bytes a token to find places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.store.fm.wavelet import Bits, bit, build, descend, distinct, ones, pack, symbol_at

Ids = NDArray[np.int64]
Span = tuple[int, int]
CLOSED, BORDER, TOKENS = 0, 1, 2  # symbols; tokens from 2 on
EVERY = 32  # places of which one is noted
HEAD = 4096  # of a file


@dataclass(frozen=True)
class Fm:
    """One index, as it stands on disk. A span is a half-open range of rows: all places where a text ends."""

    tree: Bits  # of the symbol that precedes each sorted suffix
    zeros: NDArray[np.int64]  # of each level
    tokens: NDArray[np.uint32]  # ids that occur, ascending: symbol - 2 is the place here
    marks: Bits  # [1, rows]: the place of this row is noted
    places: NDArray[np.uint32]  # of marked rows, in the order of rows: of the reversed text
    starts: NDArray[np.uint32]  # [documents + 1] where each begins, in the text as it was; borders count

    @property
    def rows(self) -> int:
        return int(self.starts[-1]) + 1

    @property
    def size(self) -> int:
        """Tokens, borders left out."""
        return int(self.starts[-1]) - self.documents

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    @property
    def bytes(self) -> int:
        arrays = (self.zeros, self.tokens, self.places, self.starts)
        return HEAD + self.tree.bytes + self.marks.bytes + sum(array.nbytes for array in arrays)

    @cached_property
    def base(self) -> Ids:
        """By symbol: what makes a row of its place at the bottom of the tree. Made in tens of milliseconds."""
        return _bases(self.tree.words, self.tree.counts, self.zeros, len(self.tokens) + TOKENS, self.rows)

    @property
    def everything(self) -> Span:
        return 0, self.rows

    def narrow(self, span: Span, token: int) -> Span:
        """The places where the span's text goes on with the token; empty where it never does."""
        symbol = self._symbol(token)
        if symbol is None or span[0] >= span[1]:
            return 0, 0
        low, high = (
            int(self.base[symbol]) + descend(self.tree.words, self.tree.counts, self.zeros, symbol, place)
            for place in span
        )
        return (low, high) if low < high else (0, 0)

    def find(self, query: Ids) -> Span:
        span = self.everything
        for token in query:
            span = self.narrow(span, int(token))
        return span

    def count(self, query: Ids) -> int:
        """How often these tokens occur one behind the other; of no tokens, all of the corpus."""
        low, high = self.find(query)
        return high - low if len(query) else self.size

    def following(self, span: Span) -> tuple[Ids, Ids]:
        """Which tokens follow the span's text, ascending, and how often; ends of documents are left out."""
        symbols, counts = distinct(self.tree.words, self.tree.counts, self.zeros, *span)
        first = int(symbols.searchsorted(TOKENS))
        return self.tokens[symbols[first:] - TOKENS].astype(np.int64), counts[first:]

    def ends(self, span: Span) -> Ids:
        """Where the span's text ends, for each of its rows: the place of its last token in the corpus."""
        places = _located(
            self.tree.words, self.tree.counts, self.zeros, self.base, self.marks.words, self.marks.counts,
            self.places, *span,
        )  # fmt: skip
        return self.rows - 2 - places

    def documents_of(self, places: Ids) -> Ids:
        """The document in which each place lies."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def document(self, number: int) -> Ids:
        """The tokens of a document, read back out of the index."""
        low, high = int(self.starts[number]), int(self.starts[number + 1]) - 1
        return self.text(low, high)

    def text(self, low: int, high: int) -> Ids:
        """Tokens low .. high of the corpus; borders are -1."""
        end = self.rows - 1 - low  # place behind which, going back in the reversed text, the stretch begins
        order, places = self._by_place
        at = int(places.searchsorted(end))
        row, place = (int(order[at]), int(places[at])) if at < len(places) else (0, self.rows - 1)
        symbols = _read(
            self.tree.words, self.tree.counts, self.zeros, self.base, row, place - end, high - low
        )  # fmt: skip
        found = np.full(len(symbols), -1, dtype=np.int64)
        real = symbols >= TOKENS
        found[real] = self.tokens[symbols[real] - TOKENS]
        return found

    @cached_property
    def _by_place(self) -> tuple[Ids, Ids]:
        """Marked rows in the order of their places, and the places."""
        bits = np.unpackbits(self.marks.words[0].view(np.uint8), bitorder="little")[: self.rows]
        rows = np.flatnonzero(bits)
        order = np.argsort(self.places, kind="stable")
        return rows[order], self.places[order].astype(np.int64)

    def _symbol(self, token: int) -> int | None:
        at = int(self.tokens.searchsorted(token)) if token >= 0 else len(self.tokens)
        return at + TOKENS if at < len(self.tokens) and self.tokens[at] == token else None


def index(documents: Iterator[Ids] | list[Ids], order_of: Any) -> Fm:
    """Of documents, in one go; `order_of` sorts the suffixes of bytes."""
    parts, starts = [], [0]
    for document in documents:
        parts += [np.asarray(document, dtype=np.int64), np.array([-1])]
        starts.append(starts[-1] + len(document) + 1)
    text = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return index_text(text, np.array(starts, dtype=np.uint32), order_of)


def index_text(text: Ids, starts: NDArray[np.uint32], order_of: Any) -> Fm:
    """Of all documents joined, with -1 at each border."""
    tokens = np.unique(text[text >= 0]).astype(np.uint32)
    symbols = np.where(text >= 0, tokens.searchsorted(text.clip(0)) + TOKENS, BORDER)[::-1]
    width = 2 if len(tokens) + TOKENS <= 1 << 16 else 4
    turned = np.append(symbols, CLOSED).astype(f">u{width}")
    sorted_bytes = order_of(np.ascontiguousarray(turned).view(np.uint8))
    suffixes = sorted_bytes[sorted_bytes % width == 0] // width
    before = turned[suffixes - 1].astype(np.uint32)  # of the first place: what closes the whole
    levels = max(1, int(len(tokens) + TOKENS - 1).bit_length())
    tree, zeros = build(before, levels)
    noted = suffixes % EVERY == 0
    marks = pack(noted.astype(np.uint8)[None])
    return Fm(tree, zeros, tokens, marks, suffixes[noted].astype(np.uint32), starts)


@compiled
def _bases(words: Any, counts: Any, zeros: Any, symbols: int, rows: int) -> Any:
    """Where each symbol's rows begin, less where it begins at the bottom of the tree."""
    base, before = np.empty(symbols, np.int64), 0
    for symbol in range(symbols):
        low, high = (descend(words, counts, zeros, symbol, 0), descend(words, counts, zeros, symbol, rows))
        base[symbol] = before - low
        before += high - low
    return base


@compiled
def _located(
    words: Any, counts: Any, zeros: Any, base: Any, marks: Any, mark_counts: Any, places: Any, low: int, high: int
) -> Any:  # fmt: skip
    """Where each row's suffix begins: from a noted place that is reached by going back."""
    found = np.empty(high - low, np.int64)
    for i in range(high - low):
        row, steps = low + i, 0
        while not bit(marks, 0, row):
            symbol, place = symbol_at(words, counts, zeros, row)
            row = base[symbol] + place
            steps += 1
        found[i] = np.int64(places[ones(marks, mark_counts, 0, row)]) + steps
    return found


@compiled
def _read(words: Any, counts: Any, zeros: Any, base: Any, row: int, skip: int, size: int) -> Any:
    """The symbols before a row's suffix, going back: after `skip` of them, `size`."""
    found = np.empty(size, np.int64)
    for i in range(skip + size):
        symbol, place = symbol_at(words, counts, zeros, row)
        row = base[symbol] + place
        if i >= skip:
            found[i - skip] = symbol
    return found
