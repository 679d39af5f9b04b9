"""A wavelet matrix: a sequence of symbols as bits, level by level, that counts symbols before any place.

Level l holds bit l of every symbol (the highest first), in an order in which all symbols with a 0 at the level before
stand first. How many of a symbol stand in [0, i) takes one count of bits a level; so do the symbol at i and, for each
of them, the distinct symbols of a span. Space: a bit a symbol and level, and a sixteenth more for the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled

Array = NDArray[Any]
BLOCK = 8  # words between two counts

ONES = np.uint64(0x5555555555555555)
TWOS = np.uint64(0x3333333333333333)
FOURS = np.uint64(0x0F0F0F0F0F0F0F0F)
EIGHTS = np.uint64(0x0101010101010101)


@dataclass(frozen=True, slots=True)
class Bits:
    """Rows of bits, and the number of set ones before every eighth word."""

    words: NDArray[np.uint64]  # [rows, W]
    counts: NDArray[np.uint32]  # [rows, W / 8 + 1]

    @property
    def bytes(self) -> int:
        return int(self.words.nbytes + self.counts.nbytes)


def pack(rows: NDArray[np.uint8]) -> Bits:
    """Of [rows, size] zeros and ones."""
    count, size = rows.shape
    width = -(-size // 64) + 1  # a place behind the last one can be asked for
    padded = np.zeros((count, width * 64), dtype=np.uint8)
    padded[:, :size] = rows
    words = np.packbits(padded, axis=1, bitorder="little").view("<u8")
    return Bits(words, counted(words))


def counted(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    blocks = -(-words.shape[1] // BLOCK)
    padded = np.zeros((len(words), blocks * BLOCK), dtype=np.uint8)
    padded[:, : words.shape[1]] = np.bitwise_count(words)
    sums = padded.reshape(len(words), blocks, BLOCK).sum(2, dtype=np.uint32)
    counts = np.zeros((len(words), blocks + 1), dtype=np.uint32)
    np.cumsum(sums, axis=1, out=counts[:, 1:])
    return counts


def build(symbols: NDArray[Any], levels: int) -> tuple[Bits, NDArray[np.int64]]:
    """The matrix of these symbols, each below 2 ** levels, and how many zeros each level has."""
    size = len(symbols)
    width = -(-size // 64) + 1
    words = np.zeros((levels, width), dtype=np.uint64)
    zeros = np.zeros(levels, dtype=np.int64)
    for level in range(levels):
        bits = ((symbols >> (levels - 1 - level)) & 1).astype(np.uint8)
        words[level] = pack(bits[None]).words[0]
        zeros[level] = size - int(bits.sum())
        symbols = np.concatenate([symbols[bits == 0], symbols[bits == 1]])
    return Bits(words, counted(words)), zeros


@compiled
def ones(words: Array, counts: Array, row: int, place: int) -> Any:
    """Set bits of a row in [0, place)."""
    word = place >> 6
    block = word >> 3
    total = np.int64(counts[row, block])
    for i in range(block << 3, word):
        total += _ones(words[row, i])
    rest = place & 63
    if rest:
        total += _ones(words[row, word] & ((np.uint64(1) << np.uint64(rest)) - np.uint64(1)))
    return total


@compiled
def _ones(x: Any) -> Any:
    x = x - ((x >> np.uint64(1)) & ONES)
    x = (x & TWOS) + ((x >> np.uint64(2)) & TWOS)
    x = (x + (x >> np.uint64(4))) & FOURS
    return np.int64((x * EIGHTS) >> np.uint64(56))


@compiled
def bit(words: Array, row: int, place: int) -> Any:
    return np.int64((words[row, place >> 6] >> np.uint64(place & 63)) & np.uint64(1))


@compiled
def descend(words: Array, counts: Array, zeros: Array, symbol: int, place: int) -> int:
    """Where [0, place) ends among the symbols equal to `symbol` at the bottom."""
    levels = len(zeros)
    for level in range(levels):
        before = ones(words, counts, level, place)
        place = zeros[level] + before if (symbol >> (levels - 1 - level)) & 1 else place - before
    return place


@compiled
def symbol_at(words: Array, counts: Array, zeros: Array, place: int) -> tuple[int, int]:
    """The symbol at a place, and where that very one stands at the bottom."""
    levels, symbol = len(zeros), 0
    for level in range(levels):
        before = ones(words, counts, level, place)
        one = bit(words, level, place)
        symbol = 2 * symbol + one
        place = zeros[level] + before if one else place - before
    return symbol, place


@compiled
def distinct(words: Array, counts: Array, zeros: Array, low: int, high: int) -> tuple[Array, Array]:
    """The symbols of [low, high), ascending, and how often each stands there."""
    levels = len(zeros)
    symbols, found = np.empty(16, np.int64), np.empty(16, np.int64)
    used = 0
    stack = np.empty((2 * levels + 2, 4), np.int64)  # level, the symbol's bits so far, low, high
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = 0, 0, low, high
    top = 1 if low < high else 0
    while top:
        top -= 1
        level, symbol, first, last = stack[top, 0], stack[top, 1], stack[top, 2], stack[top, 3]
        if level == levels:
            if used == len(symbols):
                symbols = np.concatenate((symbols, np.empty_like(symbols)))
                found = np.concatenate((found, np.empty_like(found)))
            symbols[used], found[used] = symbol, last - first
            used += 1
            continue
        ones_low, ones_high = ones(words, counts, level, first), ones(words, counts, level, last)
        if ones_low < ones_high:  # put first, taken last: zeros come before ones
            stack[top, 0], stack[top, 1] = level + 1, 2 * symbol + 1
            stack[top, 2], stack[top, 3] = zeros[level] + ones_low, zeros[level] + ones_high
            top += 1
        if first - ones_low < last - ones_high:
            stack[top, 0], stack[top, 1] = level + 1, 2 * symbol
            stack[top, 2], stack[top, 3] = first - ones_low, last - ones_high
            top += 1
    return symbols[:used], found[:used]
