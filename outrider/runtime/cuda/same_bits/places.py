"""Where things stand, in Triton: whose a row or a tile of a pass is, and what a path leads over.

A node's ancestors are the bits of its words, in the order in which they are stored, which is that of their depths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.runtime.cuda.reference import MAX_NODES

_NODES = tl.constexpr(MAX_NODES)


@triton.jit
def sequence(begins, row, sequences, MANY: tl.constexpr):
    """[rows]: the sequence that rows of the pass belong to."""
    each = tl.arange(0, MANY)
    starts = tl.load(begins + each, mask=each < sequences, other=1 << 30).to(tl.int32)
    return tl.sum((starts[None, :] <= row[:, None]).to(tl.int32), 1) - 1


@triton.jit
def sequence_of(begins, row, sequences, MANY: tl.constexpr):
    """The same of a single row."""
    each = tl.arange(0, MANY)
    starts = tl.load(begins + each, mask=each < sequences, other=1 << 30).to(tl.int32)
    return tl.sum((starts <= row).to(tl.int32), 0) - 1


@triton.jit
def tile_of(begins, unit, sequences, ROWS: tl.constexpr, MANY: tl.constexpr):
    """The sequence of a tile, and which of its tiles it is: they begin at the number of whole ones before, and one
    more for each sequence before it."""
    each = tl.arange(0, MANY)
    starts = tl.load(begins + each, mask=each < sequences, other=1 << 30).to(tl.int32) // ROWS + each
    sequence = tl.sum((starts <= unit).to(tl.int32), 0) - 1
    return sequence, unit - tl.max(tl.where(starts <= unit, starts, 0), 0)


@triton.jit
def branches(words, base, count, nodes, is_text, WORDS: tl.constexpr):
    """Whether some node in flight does not see all before it: then the last one does not."""
    last = words + (base + tl.maximum(count, 1) - 1) * WORDS
    few = tl.minimum(nodes, 64)
    seen = ones(tl.load(last))
    if WORDS > 1:
        seen += ones(tl.load(last + 1))
        few = nodes
    return (is_text == 0) & (count > 0) & (seen < few)


@triton.jit
def ones(word):
    """Bits of a word that are set."""
    return tl.sum(((word >> tl.arange(0, 64).to(tl.int64)) & 1).to(tl.int32), 0)


@triton.jit
def on_path(word, second, WORDS: tl.constexpr):
    """[nodes]: which nodes a path leads over."""
    node = tl.arange(0, _NODES)
    bits = word >> tl.where(node < 64, node, 0).to(tl.int64)
    if WORDS > 1:
        bits = tl.where(node < 64, bits, second >> tl.where(node < 64, 0, node - 64).to(tl.int64))
        return (bits & 1).to(tl.int32)
    return tl.where(node < 64, bits & 1, 0).to(tl.int32)


@triton.jit
def node_at(depth, path):
    """[n]: the path's nodes at these depths."""
    node = tl.arange(0, _NODES)
    rank = tl.cumsum(path, 0) - 1
    found = (rank[None, :] == depth[:, None]) & (path != 0)[None, :]
    return tl.sum(tl.where(found, node[None, :], 0), 1)


@triton.jit
def depths(words, row, real, WORDS: tl.constexpr):
    """[rows]: how deep in its tree each stands."""
    bit = tl.arange(0, 64).to(tl.int64)
    depth = tl.sum(((tl.load(words + row * WORDS, mask=real, other=0)[:, None] >> bit[None, :]) & 1).to(tl.int32), 1)
    if WORDS > 1:
        second = tl.load(words + row * WORDS + 1, mask=real, other=0)
        depth += tl.sum(((second[:, None] >> bit[None, :]) & 1).to(tl.int32), 1)
    return tl.maximum(depth - 1, 0)


@triton.jit
def leads(words, base, count, in_flight, local, depth, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Whether a row's path is computed for its own sake: it ends there, or so many rows deep that they fill a tile."""
    node, later = in_flight - count + local, tl.arange(0, _NODES)
    inside = (later > local) & (later < count)
    half = 0
    if WORDS > 1:
        half = node // 64
    mask = tl.load(words + (base + later) * WORDS + half, mask=inside, other=0)
    children = tl.sum(((mask >> (node % 64).to(tl.int64)) & 1).to(tl.int32), 0)
    return (children == 0) | (depth % ROWS == ROWS - 1)
