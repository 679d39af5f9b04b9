"""Attention of one row and head over a slot's cache: the committed text, then the row's own ancestors.

Keys lie in blocks of positions, a dimension's values side by side, so that a block is scored in vectors; values lie row
by row. Rows in flight stand behind the text in the order of their tree; the scores of a row's ancestors are drawn
together, so that everything after sees a plain text. Every sum is taken in the order of positions or dimensions, one
term at a time: a row's bits are those of the same text in any tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.compiled import compiled
from outrider.native.numbers import fma, softmax

BLOCK = 64  # positions whose keys lie together
Array = NDArray[np.float32]
_ZERO = np.float32(0.0)


@compiled
def attend(
    query: Array,  # [D], scaled
    keys: Array,  # [blocks, D, BLOCK]
    values: Array,  # [blocks * BLOCK, D]
    length: int,  # positions of committed text
    sees: NDArray[np.bool_],  # [nodes]: its ancestors among the rows in flight, and itself, the last
    window: int,  # positions that the row sees, itself among them; 0: all
    scores: Array,  # [blocks * BLOCK], overwritten
    out: Array,  # [D], overwritten
) -> None:
    nodes, straight = len(sees), 0
    while straight < nodes and sees[straight]:
        straight += 1
    text = length + straight  # so far positions and places are the same
    for block in range(0 if not window else max(0, text - window) // BLOCK, (length + nodes + BLOCK - 1) // BLOCK):
        _score(query, keys[block], scores[block * BLOCK : (block + 1) * BLOCK])
    end = text
    for node in range(straight, nodes):
        if sees[node]:
            scores[end] = scores[length + node]
            end += 1
    begin = max(0, end - window) if window else 0
    softmax(scores[begin:end])
    out[:] = _ZERO
    if begin < text:
        _add(scores[begin:text], values[begin:text], out)
    end = text
    for node in range(straight, nodes):
        if sees[node]:
            if end >= begin:
                _add(scores[end : end + 1], values[length + node : length + node + 1], out)
            end += 1


@compiled
def _score(query: Array, keys: Array, scores: Array) -> None:
    """scores[j] = query . keys[:, j], added dimension by dimension."""
    dims, first = len(query), len(query) % 4
    for j in range(BLOCK):
        scores[j] = _ZERO
    for d in range(first):
        for j in range(BLOCK):
            scores[j] = fma(query[d], keys[d, j], scores[j])
    for d in range(first, dims, 4):
        a, b, c, e = query[d], query[d + 1], query[d + 2], query[d + 3]
        for j in range(BLOCK):
            s = fma(b, keys[d + 1, j], fma(a, keys[d, j], scores[j]))
            scores[j] = fma(e, keys[d + 3, j], fma(c, keys[d + 2, j], s))


@compiled
def _add(weights: Array, values: Array, out: Array) -> None:
    """Changes `out`: plus weights[j] * values[j], position by position."""
    count, first, dims = len(weights), len(weights) % 4, len(out)
    for j in range(first):
        for d in range(dims):
            out[d] = fma(weights[j], values[j, d], out[d])
    for j in range(first, count, 4):
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(dims):
            s = fma(b, values[j + 1, d], fma(a, values[j, d], out[d]))
            out[d] = fma(e, values[j + 3, d], fma(c, values[j + 2, d], s))
