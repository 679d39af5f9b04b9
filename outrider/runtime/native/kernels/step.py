"""Step: a whole forward of a Llama-like decoder in one call, on every thread of a team.

Rows may belong to several slots. A thread has its share of the columns of each product and of the heads; it waits for
the others five times a layer. What comes before a product (a norm, rounding) needs whole rows: of few rows every thread
does all on its own, of many its share. A row's bits depend on what it sees alone, neither on other rows nor on threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.llvm import apart
from outrider.core.numeric.numbers import copy, gate, norm, rotate
from outrider.runtime.native.kernels.attention import BLOCK, MAX_QUERIES, attend, block_of
from outrider.runtime.native.kernels.linear import share
from outrider.runtime.native.kernels.products import Linear, PreparedRows, look_up, prepare, product
from outrider.runtime.native.kernels.screen import Screen, screened
from outrider.runtime.native.kernels.team import barrier

Floats = NDArray[np.float32]
FEW = 4  # rows: waiting for a share of the work costs more than doing all of it


class Weights(NamedTuple):
    embedding: Linear  # of one layer, of 32 or 8 bits; where they are tied, the arrays of the head
    before_attention: Floats  # [L, hidden]: norms
    before_mlp: Floats  # [L, hidden]
    last: Floats  # [hidden]
    query_norm: Floats  # [L, D]; [L, 0]: none
    key_norm: Floats
    windows: NDArray[np.int64]  # [L]: positions that a row sees, itself among them; 0: all
    screen: Screen  # of the head
    qkv: Linear  # N: heads of queries, of keys, of values
    out: Linear
    gate: Linear
    up: Linear
    down: Linear
    head: Linear  # of one layer, likewise


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    scale: float  # of queries
    epsilon: float  # of norms


class Store(NamedTuple):
    """Keys and values of all slots; see `attention` for their order."""

    keys: Floats  # [pages, L, kv_heads, PAGE, D, BLOCK]
    values: Floats  # [pages, L, kv_heads, PAGE, BLOCK, D]
    tables: NDArray[np.int64]  # [slots, pages]: those of a slot, in the order of its text


class Batch(NamedTuple):
    """The rows of one step."""

    tokens: NDArray[np.int64]  # [R]; below 0: a vector, -1 the first of them
    vectors: Floats  # [side rows, hidden]
    slots: NDArray[np.int64]  # [R]
    lengths: NDArray[np.int64]  # [R]: committed text of the slot
    places: NDArray[np.int64]  # [R]: where its keys and values go
    sees: NDArray[np.bool_]  # [R, nodes]: its ancestors among the rows in flight of its slot, and itself
    cos: Floats  # [R, D]
    sin: Floats
    taken: NDArray[np.int64]  # [L + 1]: place in `hidden` of what enters a layer, and of the last norm; -1: nowhere


class Work(NamedTuple):
    """Room for what a step computes on its way; rows are as many as were met, or more."""

    x: Floats  # [R, hidden]
    added: Floats  # [R, hidden]: what comes on top
    qkv: Floats  # [R, heads of queries, keys, values]
    attended: Floats  # [R, heads * D]
    gates: Floats  # [R, inner]
    ups: Floats  # [R, inner]
    heads: Floats  # [threads, MAX_QUERIES, D]: queries of attention, then what they find
    scores: Floats  # [threads, MAX_QUERIES, positions or more]
    normed: Floats  # [threads, R, hidden]
    from_hidden: PreparedRows  # what products read, by their widths
    from_attended: PreparedRows
    from_inner: PreparedRows
    from_last: PreparedRows  # for the screen
    floors: Floats  # [threads, R]


class Outputs(NamedTuple):
    logits: Floats  # [S, V]: of the first S rows, those that are asked for
    hidden: Floats  # [taken, R, hidden]
    best: Floats  # [threads, S]: the largest logit of each thread's share, where that alone must be exact; else [0, S]
    which: NDArray[np.int64]  # and its token


@compiled
def step(
    me: int, threads: int, sync: NDArray[np.int64], weights: Weights, sizes: Sizes, store: Store, batch: Batch,
    work: Work, outputs: Outputs,
) -> None:  # fmt: skip
    rows, x = len(batch.tokens), work.x
    few = rows <= FEW
    first, last = rows * me // threads, rows * (me + 1) // threads
    for row in range(first, last):
        if batch.tokens[row] < 0:
            copy(batch.vectors[-1 - batch.tokens[row]], x[row])
        else:
            look_up(weights.embedding, batch.tokens[row], x[row])
    barrier(sync, threads)
    for layer in range(len(weights.windows)):
        _keep(x, batch.taken[layer], outputs.hidden, first, last)
        at = _normed(me, threads, sync, few, rows, weights.before_attention[layer], sizes.epsilon, work)
        _project(me, threads, rows, weights, layer, sizes, store, batch, work, at)
        barrier(sync, threads)
        _attend(me, threads, rows, layer, weights.windows[layer], sizes, store, batch, work)
        barrier(sync, threads)
        at = _ready(me, threads, sync, few, rows, work.attended, work.from_attended)
        _add(me, threads, rows, weights.out, layer, work.from_attended, at, work)
        barrier(sync, threads)
        at = _normed(me, threads, sync, few, rows, weights.before_mlp[layer], sizes.epsilon, work)
        _gate(me, threads, rows, weights, layer, work, at)
        barrier(sync, threads)
        at = _ready(me, threads, sync, few, rows, work.gates, work.from_inner)
        _add(me, threads, rows, weights.down, layer, work.from_inner, at, work)
        barrier(sync, threads)
    at = _normed(me, threads, sync, few, rows, weights.last, sizes.epsilon, work)
    _keep(work.normed[at], batch.taken[-1], outputs.hidden, first, last)
    if len(outputs.which):
        near = _ready(me, threads, sync, few, rows, work.normed[at], work.from_last)
        screened(
            me, threads, sync, weights.screen, weights.head, work.from_last, near, work.from_hidden, at,
            work.normed[at], outputs.logits, work.floors, outputs.best, outputs.which,
        )  # fmt: skip
    elif len(outputs.logits):
        low, high = share(outputs.logits.shape[1], me, threads)
        product(weights.head, 0, work.from_hidden, at, len(outputs.logits), outputs.logits, low, high)


@compiled
def _keep(x: Floats, place: int, hidden: Floats, first: int, last: int) -> None:
    if place >= 0:
        for row in range(first, last):
            copy(x[row], hidden[place, row])


@compiled
def _ready(
    me: int, threads: int, sync: NDArray[np.int64], few: bool, rows: int, x: Floats, made: PreparedRows
) -> int:  # fmt: skip
    """Makes all rows of x ready for a product; gives the copy to read."""
    apart()
    if few:
        prepare(x, made, me, 0, rows)
        return me
    prepare(x, made, 0, rows * me // threads, rows * (me + 1) // threads)
    barrier(sync, threads)
    return 0


@compiled
def _normed(
    me: int, threads: int, sync: NDArray[np.int64], few: bool, rows: int, weight: Floats, epsilon: float, work: Work
) -> int:  # fmt: skip
    """The same behind a norm."""
    apart()
    low, high, at = (0, rows, me) if few else (rows * me // threads, rows * (me + 1) // threads, 0)
    for row in range(low, high):
        norm(work.x[row], weight, epsilon, work.normed[at, row])
    return _ready(me, threads, sync, few, rows, work.normed[at], work.from_hidden)


@compiled
def _add(me: int, threads: int, rows: int, linear: Linear, layer: int, made: PreparedRows, at: int, work: Work) -> None:
    """My columns of a product, on top of x."""
    apart()
    low, high = share(work.x.shape[1], me, threads)
    product(linear, layer, made, at, rows, work.added, low, high)
    for row in range(rows):
        for n in range(low, high):
            work.x[row, n] += work.added[row, n]


@compiled
def _gate(me: int, threads: int, rows: int, weights: Weights, layer: int, work: Work, at: int) -> None:
    """My columns of silu(gates) * ups, in the place of the gates."""
    apart()
    low, high = share(work.gates.shape[1], me, threads)
    product(weights.gate, layer, work.from_hidden, at, rows, work.gates, low, high)
    product(weights.up, layer, work.from_hidden, at, rows, work.ups, low, high)
    for row in range(rows):
        gate(work.gates[row, low:high], work.ups[row, low:high])


@compiled
def _project(
    me: int, threads: int, rows: int, weights: Weights, layer: int, sizes: Sizes, store: Store, batch: Batch,
    work: Work, at: int,
) -> None:  # fmt: skip
    """My heads of queries, keys and values: rotated to their positions, and the latter two stored."""
    apart()
    dim, heads, kv_heads = sizes.dim, sizes.heads, sizes.kv_heads
    many = heads + 2 * kv_heads
    first, last = many * me // threads, many * (me + 1) // threads
    product(weights.qkv, layer, work.from_hidden, at, rows, work.qkv, first * dim, last * dim)
    scale = np.float32(sizes.scale)
    for row in range(rows):
        slot, place, cos, sin = batch.slots[row], batch.places[row], batch.cos[row], batch.sin[row]
        for head in range(first, last):
            part = work.qkv[row, head * dim : (head + 1) * dim]
            if head < heads:
                if weights.query_norm.shape[1]:
                    norm(part, weights.query_norm[layer], sizes.epsilon, part)
                rotate(part, cos, sin)
                for d in range(dim):
                    part[d] *= scale
            elif head < heads + kv_heads:
                if weights.key_norm.shape[1]:
                    norm(part, weights.key_norm[layer], sizes.epsilon, part)
                rotate(part, cos, sin)
                keys = block_of(store.keys, store.tables[slot], place // BLOCK, layer, head - heads)
                for d in range(dim):
                    keys[d, place % BLOCK] = part[d]
            else:
                values = block_of(store.values, store.tables[slot], place // BLOCK, layer, head - heads - kv_heads)
                copy(part, values[place % BLOCK])


@compiled
def _attend(
    me: int, threads: int, rows: int, layer: int, window: int, sizes: Sizes, store: Store, batch: Batch, work: Work
) -> None:  # fmt: skip
    """My share of rows and heads, those of a slot that read the same keys together."""
    apart()
    dim, group = sizes.dim, sizes.heads // sizes.kv_heads
    every = rows * group  # that read one head's keys
    unit = group if rows * sizes.kv_heads >= threads else 1  # a row's stay together, unless threads would be idle
    items = sizes.kv_heads * every // unit
    heads = work.heads[me]
    at, stop = items * me // threads * unit, items * (me + 1) // threads * unit
    while at < stop:
        kv, first = at // every, at % every
        row = first // group
        slot, length, behind = batch.slots[row], batch.lengths[row], row + 1
        while behind < rows and batch.slots[behind] == slot:
            behind += 1
        many = min(MAX_QUERIES, stop - at, behind * group - first)
        behind = (first + many - 1) // group + 1
        for i in range(many):
            head = kv * group + (first + i) % group
            copy(work.qkv[(first + i) // group, head * dim : (head + 1) * dim], heads[i])
        attend(
            heads[:many], group, first % group, store.keys, store.values, store.tables[slot], layer, kv, length,
            batch.sees[row:behind, : batch.places[behind - 1] - length + 1], window, work.scores[me],
        )  # fmt: skip
        for i in range(many):
            head = kv * group + (first + i) % group
            copy(heads[i], work.attended[(first + i) // group, head * dim : (head + 1) * dim])
        at += many
