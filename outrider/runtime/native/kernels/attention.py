"""Attention of several heads and rows over a slot's cache: the committed text, then a row's own ancestors.

Keys and values lie in blocks of positions, some blocks of all layers and heads to a page, and a table says which page
comes where in a slot's text: a short text touches little memory, and texts that begin alike read the same pages. In a
block of keys a dimension's values are side by side, so that it is scored in vectors; values lie row by row. Rows in
flight stand behind the text in the order of their tree; the scores of a row's ancestors are drawn together, so that
everything after sees a plain text. Products are added in the order of positions or dimensions, one at a time: a row's
bits are those of the same text in any tree and any pages. All that reads the same keys goes through a block together,
while it is near, and what is read into a register serves three of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from outrider.core.numeric import llvm
from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.llvm import (
    F32,
    I8,
    I64,
    LANES,
    LINE,
    address,
    apart,
    each,
    fetch,
    fused,
    plus,
    spread,
    variable,
    zeros,
)
from outrider.core.numeric.numbers import fma, softmax

BLOCK = 64  # positions whose keys lie together, and of values that are added together
PAGE = 4  # blocks that a head has side by side: read as fast as a whole text in one piece, and touched together
MAX_QUERIES = 24  # heads, of all rows, that go through a block together
FLOAT = 4  # bytes
Array = NDArray[np.float32]
Pages = NDArray[np.int64]  # of a slot, in the order of its text
_ZERO = np.float32(0.0)


@compiled
def block_of(stored: Array, pages: Pages, block: int, layer: int, kv: int) -> Array:
    """Keys or values of one head in a slot: [D, BLOCK] or [BLOCK, D]."""
    return stored[pages[block // PAGE], layer, kv, block % PAGE]


@compiled
def attend(
    heads: Array,  # [H, D]: queries, scaled, row by row; overwritten by what they find
    group: int,  # heads of a row that share keys
    skipped: int,  # heads of the first row that are not among these
    keys: Array,  # [pages, L, kv_heads, PAGE, D, BLOCK]: of all slots
    values: Array,  # [pages, L, kv_heads, PAGE, BLOCK, D]
    pages: Pages,  # of the slot: one more than its rows need
    layer: int,
    kv: int,  # the head whose keys and values they are
    length: int,  # positions of committed text
    sees: NDArray[np.bool_],  # [R, nodes]: a row's ancestors among the rows in flight, and itself, the last
    window: int,  # positions that a row sees, itself among them; 0: all
    scores: Array,  # [H or more, positions or more], overwritten
) -> None:
    apart()
    many, dim, nodes = len(heads), heads.shape[1], sees.shape[1]
    reach = length + nodes
    none, one = int(np.int64(0)), int(np.int64(1))  # numba would compile `_add` anew for a number in a call
    lowest, first, last = reach, 0, reach  # where a row begins, and what all see as plain text
    for row in range(len(sees)):
        begin, text, _ = _seen(sees[row], length, window)
        lowest, first, last = min(lowest, begin), max(first, begin), min(last, text)
    last = max(first, last)
    blocks = (reach + BLOCK - 1) // BLOCK
    here = address(block_of(values, pages, first // BLOCK, layer, kv)) + first % BLOCK * dim * FLOAT
    behind = address(block_of(keys, pages, lowest // BLOCK, layer, kv)) + BLOCK * dim * FLOAT  # the next head's keys
    for block in range(lowest // BLOCK, blocks):
        coming = address(block_of(keys, pages, block + 1, layer, kv)) if block + 1 < blocks else here
        stored = block_of(keys, pages, block, layer, kv)
        _add(scores, none, many, block * BLOCK, stored.shape[1], heads, none, stored, none, dim, one, coming)
    for row in range(len(sees)):
        begin, text, end = _seen(sees[row], length, window)
        low, high = max(0, row * group - skipped), min(many, (row + 1) * group - skipped)
        for head in range(low, high):
            line, at = scores[head], text
            for node in range(text - length, nodes):
                if sees[row, node]:
                    line[at] = line[length + node]
                    at += 1
            softmax(line[begin:end])
            for d in range(dim):
                heads[head, d] = _ZERO
        _collect(heads, low, high, scores, begin, begin, min(first, text) - begin, values, pages, layer, kv, here)
    _collect(heads, none, many, scores, first, first, last - first, values, pages, layer, kv, behind)
    for row in range(len(sees)):
        begin, text, _ = _seen(sees[row], length, window)
        low, high = max(0, row * group - skipped), min(many, (row + 1) * group - skipped)
        _collect(heads, low, high, scores, last, last, text - last, values, pages, layer, kv, here)
        at = text
        for node in range(text - length, nodes):
            if sees[row, node]:
                if at >= begin:
                    _collect(heads, low, high, scores, at, length + node, one, values, pages, layer, kv, here)
                at += 1


@compiled
def _collect(
    heads: Array, low: int, high: int, scores: Array, position: int, place: int, count: int, values: Array,
    pages: Pages, layer: int, kv: int, after: int,
) -> None:  # fmt: skip
    """Changes heads[low:high]: plus `count` values from `place` on, by their scores from `position` on.

    After: the address of what is read behind them.
    """
    apart()
    none, dim = int(np.int64(0)), heads.shape[1]
    done = none
    while done < count:
        at = place + done
        block, row = at // BLOCK, at % BLOCK
        some, stored = min(BLOCK - row, count - done), block_of(values, pages, block, layer, kv)
        coming = address(block_of(values, pages, block + 1, layer, kv)) if done + some < count else after
        _add(heads, low, high, none, dim, scores, position + done, stored, row, some, none, coming)
        done += some


@compiled
def _seen(sees: NDArray[np.bool_], length: int, window: int) -> tuple[int, int, int]:
    """Of a row: its first position, up to where positions and places are the same, and behind its last."""
    apart()
    straight, nodes = 0, len(sees)
    while straight < nodes and sees[straight]:
        straight += 1
    end = length + straight
    for node in range(straight, nodes):
        end += sees[node]
    return max(0, end - window) if window else 0, length + straight, end


def _tile(heads: int, width: int) -> Callable[..., Any]:
    """What `_add` does for so many heads, over whole `width`s of columns: their sums are in registers.

    (factors [H, I], matrix [M, N], out [H, W]), (head, factor, row, count, column, columns, fresh, coming, stride):
    `stride` bytes of what is coming are fetched with a row.
    """

    def body(b: ir.IRBuilder, arrays: Sequence[llvm.Array], numbers: Sequence[ir.Value]) -> None:
        factors, matrix, out = arrays
        head, factor, row, count, column, columns, fresh, coming, stride = numbers
        kind = ir.VectorType(F32, LANES)
        every = [(k, j) for j in range(0, width, LANES) for k in range(heads)]
        with each(b, I64(0), b.udiv(columns, I64(width))) as part:
            low = b.mul(part, I64(width))
            sums = {spot: variable(b, zeros(kind)) for spot in every}
            places = {
                (k, j): b.bitcast(out.at(plus(b, head, k), plus(b, b.add(column, low), j)), kind.as_pointer())
                for k, j in every
            }
            with b.if_then(b.icmp_signed("==", fresh, I64(0))):
                for spot in every:
                    b.store(b.load(places[spot], align=4), sums[spot])
            with each(b, I64(0), count) as i:
                ahead = b.add(coming, b.mul(b.add(b.mul(part, count), i), stride))
                for line in range(0, width * FLOAT, LINE):
                    fetch(b, b.inttoptr(plus(b, ahead, line), I8.as_pointer()))
                at = b.add(factor, i)
                read = [spread(b, b.load(factors.at(plus(b, head, k), at)), LANES) for k in range(heads)]
                for k, j in every:
                    values = matrix.vector(LANES, b.add(row, i), plus(b, low, j))
                    b.store(fused(b, read[k], values, b.load(sums[k, j])), sums[k, j])
            for spot in every:
                b.store(b.load(sums[spot]), places[spot], align=4)

    return llvm.function(body)


_WIDE, _NARROW = (min(vectors, BLOCK // LANES) * LANES for vectors in (8, 4))
_ONE, _TWO, _THREE = _tile(1, _WIDE), _tile(2, _NARROW), _tile(3, _NARROW)


@compiled
def _add(
    out: Array, low: int, high: int, column: int, columns: int, factors: Array, factor: int, matrix: Array, row: int,
    count: int, fresh: int, coming: int,
) -> None:  # fmt: skip
    """Changes out[low:high, column : column + columns]: plus factors[:, factor + i] * matrix[row + i], i after i.

    Fresh (for as many columns as a block has): what `out` holds does not count. Coming: the address of what is read
    next, which is fetched meanwhile.
    """
    apart()
    if count <= 0:
        return
    head, heads, size = low, high - low, count * columns * FLOAT
    while head < high:
        left = high - head
        some = 2 if left == 4 else min(3, left)
        width = _WIDE if some == 1 else _NARROW
        arrays = (factors, matrix, out)
        numbers = (
            head, factor, row, count, column, columns, fresh,
            coming + size * (head - low) // heads, width * FLOAT * some // heads,
        )  # fmt: skip
        if some == 3:
            _THREE(arrays, numbers)
        elif some == 2:
            _TWO(arrays, numbers)
        else:
            _ONE(arrays, numbers)
        whole = columns // width * width
        for h in range(head, head + some if whole < columns else head):
            for i in range(count):
                for d in range(whole, columns):
                    out[h, column + d] = fma(factors[h, factor + i], matrix[row + i, d], out[h, column + d])
        head += some
