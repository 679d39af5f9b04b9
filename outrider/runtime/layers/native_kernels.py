"""The compiled calls of one trained layer: fuse, forward and distributions, each run by all threads of a team at once.

Weights and activations are rounded to whole numbers (`native.kernels.linear`); everything else is float32. No bit of a
result depends on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.likeliest import largest
from outrider.core.numeric.numbers import exp, fma, gate, norm, rotate, softmax
from outrider.runtime.native.kernels.linear import multiply, quantize, share
from outrider.runtime.native.kernels.team import barrier
from outrider.runtime.native.kernels.vectors import dot_tile

Floats = NDArray[np.float32]
MAX_ROWS = 64  # of one call
_ZERO = np.float32(0)
_dots_1, _dots_4 = dot_tile(1), dot_tile(4)


class Matrix(NamedTuple):
    values: NDArray[np.int8]
    scales: Floats


class Weights(NamedTuple):
    fuse: Matrix
    qkv: Matrix  # queries, keys and values below each other
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    into_head: Matrix  # of a head through `rank` numbers, else empty
    head: Matrix
    of_embedding: Floats  # norms
    of_state: Floats
    before_mlp: Floats
    before_head: Floats


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    eps: float
    rank: int  # of the head; 0: one matrix
    normed: bool  # the normed state flows past attention


class WholeRows(NamedTuple):
    """Rows in whole numbers, as products read them."""

    q: NDArray[np.int16]
    scales: Floats


class Work(NamedTuple):
    """Room for what a call computes on its way, MAX_ROWS rows of each."""

    joined: Floats  # [.., 2 d] embedding and state, normed
    qkv: Floats
    attended: Floats
    state: Floats  # behind attention
    normed: Floats
    gates: Floats
    ups: Floats
    added: Floats
    ranked: Floats  # [.., rank]
    logits: Floats
    wide: WholeRows  # of features
    both: WholeRows  # of `joined`
    across: WholeRows  # of `attended`
    narrow: WholeRows  # of `normed`
    inner: WholeRows  # of `gates`
    few: WholeRows  # of `ranked`


@compiled
def _times(
    me: int, threads: int, sync: NDArray[np.int64], matrix: Matrix, x: Floats, rows: WholeRows, out: Floats
) -> tuple[int, int]:  # fmt: skip
    """out = x times the matrix: my columns of it, [low, high), are there at the end; whose rows x are is ready."""
    count = len(x)
    quantize(x, rows.q, rows.scales, count * me // threads, count * (me + 1) // threads)
    barrier(sync, threads)
    low, high = share(out.shape[1], me, threads)
    multiply(matrix.values, matrix.scales, rows.q[:count], rows.scales, out, low, high)
    return low, high


@compiled
def fuse(
    me: int, threads: int, sync: NDArray[np.int64], matrix: Matrix, features: Floats, rows: WholeRows, out: Floats
) -> None:  # fmt: skip
    _times(me, threads, sync, matrix, features, rows, out)


@compiled
def forward(
    me: int, threads: int, sync: NDArray[np.int64], weights: Weights, shape: Sizes, work: Work, scores: Floats,
    embedded: Floats, state: Floats, angles: Floats, sees: NDArray[np.bool_], base: int, start: int, keys: Floats,
    values: Floats, out: Floats,
) -> None:  # fmt: skip
    """Changes state: keys and values [kv heads, room, D] of these rows stand from row `start` on.

    Every thread does its share of the rows between products, and of the columns in them.
    """
    rows, hidden = state.shape
    first, last = rows * me // threads, rows * (me + 1) // threads
    eps, joined, qkv = shape.eps, work.joined[:rows], work.qkv[:rows]
    for r in range(first, last):
        norm(embedded[r], weights.of_embedding, eps, joined[r, :hidden])
        norm(state[r], weights.of_state, eps, joined[r, hidden:])
    _times(me, threads, sync, weights.qkv, joined, work.both, qkv)
    barrier(sync, threads)
    for r in range(first, last):
        _store_rotated(qkv[r], angles[r], shape, keys, values, start + r)
    barrier(sync, threads)
    attended, group, dim = work.attended[:rows], shape.heads // shape.kv_heads, shape.dim
    items = rows * shape.heads
    for item in range(items * me // threads, items * (me + 1) // threads):
        head, r = divmod(item, rows)
        part = slice(head * dim, (head + 1) * dim)
        _attend(qkv[r, part], keys[head // group], values[head // group], base, sees[r], scores[me], attended[r, part])
    barrier(sync, threads)
    added, behind, normed = work.added[:rows], work.state[:rows], work.normed[:rows]
    _times(me, threads, sync, weights.out, attended, work.across, added)
    barrier(sync, threads)
    for r in range(first, last):
        past = joined[r, hidden:] if shape.normed else state[r]
        for i in range(hidden):
            behind[r, i] = past[i] + added[r, i]
        norm(behind[r], weights.before_mlp, eps, normed[r])
    gates, ups = work.gates[:rows], work.ups[:rows]
    low, high = _times(me, threads, sync, weights.gate, normed, work.narrow, gates)
    multiply(weights.up.values, weights.up.scales, work.narrow.q[:rows], work.narrow.scales, ups, low, high)
    for r in range(rows):
        gate(gates[r, low:high], ups[r, low:high])
    barrier(sync, threads)
    low, high = _times(me, threads, sync, weights.down, gates, work.inner, out)
    for r in range(rows):
        for i in range(low, high):
            out[r, i] += behind[r, i]


@compiled
def _store_rotated(row: Floats, angles: Floats, shape: Sizes, keys: Floats, values: Floats, place: int) -> None:
    """Queries and keys of one row to their position; keys and values are stored."""
    dim, half = shape.dim, shape.dim // 2
    cos, sin = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for i in range(half):
        cos[i] = cos[half + i] = np.cos(angles[i])
        sin[i] = sin[half + i] = np.sin(angles[i])
    scale = np.float32(dim**-0.5)
    for head in range(shape.heads + 2 * shape.kv_heads):
        part = row[head * dim : (head + 1) * dim]
        if head < shape.heads:
            rotate(part, cos, sin)
            for i in range(dim):
                part[i] *= scale
        elif head < shape.heads + shape.kv_heads:
            rotate(part, cos, sin)
            keys[head - shape.heads, place] = part
        else:
            values[head - shape.heads - shape.kv_heads, place] = part


@compiled
def _attend(
    query: Floats, keys: Floats, values: Floats, base: int, sees: NDArray[np.bool_], scores: Floats, out: Floats
) -> None:
    """One head of one row: sees the first `base` keys, and `sees` from there on."""
    reach = base + len(sees)
    for j in range(0, reach // 4 * 4, 4):
        _dots_4((keys, query, scores), (j,))
    for j in range(reach // 4 * 4, reach):
        _dots_1((keys, query, scores), (j,))
    for j in range(len(sees)):
        if not sees[j]:
            scores[base + j] = -np.inf
    softmax(scores[:reach])
    out[:] = _ZERO
    whole = reach // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, d = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        for i in range(len(out)):
            s = fma(b, values[j + 1, i], fma(a, values[j, i], out[i]))
            out[i] = fma(d, values[j + 3, i], fma(c, values[j + 2, i], s))
    for j in range(whole, reach):
        for i in range(len(out)):
            out[i] = fma(scores[j], values[j, i], out[i])


@compiled
def distributions(
    me: int, threads: int, sync: NDArray[np.int64], weights: Weights, shape: Sizes, work: Work, states: Floats,
    temperature: float, places: NDArray[np.int32], probs: NDArray[np.float64],
) -> None:  # fmt: skip
    """Of each state the likeliest draft ids, likeliest first, and how likely they are at this temperature."""
    rows = len(states)
    first, last = rows * me // threads, rows * (me + 1) // threads
    normed, logits = work.normed[:rows], work.logits[:rows]
    for r in range(first, last):
        norm(states[r], weights.before_head, shape.eps, normed[r])
    if shape.rank:
        ranked = work.ranked[:rows]
        _times(me, threads, sync, weights.into_head, normed, work.narrow, ranked)
        barrier(sync, threads)
        _times(me, threads, sync, weights.head, ranked, work.few, logits)
    else:
        _times(me, threads, sync, weights.head, normed, work.narrow, logits)
    barrier(sync, threads)
    if first == last:
        return
    ids, tops = largest(logits[first:last], places.shape[1])
    sharpness = np.float32(1 / temperature)
    for r in range(first, last):
        places[r] = ids[r - first]
        row, top = logits[r], tops[r - first, 0]
        for i in range(len(row)):
            row[i] = exp((row[i] - top) * sharpness)
        total = _sum(row)
        for i in range(places.shape[1]):
            probs[r, i] = row[places[r, i]] / total


@compiled
def _sum(row: Floats) -> Any:
    """In sixteen sums that become two vectors."""
    sums = np.zeros(16, np.float32)
    whole = len(row) // 16 * 16
    for i in range(0, whole, 16):
        for j in range(16):
            sums[j] += row[i + j]
    total = np.float64(0)
    for j in range(16):
        total += sums[j]
    for i in range(whole, len(row)):
        total += row[i]
    return total
