"""Tree attention whose rows have the same bits in any pass, in Triton: one order of summation, by absolute position.

The context is cut at fixed positions. In a cut the keys go by in blocks, each at the place that it has as text, through
one running softmax; cuts are joined one after another from the first on. How many rows share a tile, how many programs
share the cuts and what else is in the pass changes who computes a cut, never what is added to what. Where a tree
branches, rows see their ancestors at places that others hold otherwise: the cuts with candidates in them are computed
path by path, the ancestors drawn together as the text that they would be; whole cuts before them in tiles of all rows.
Costs the cache read once for each tile, the last cut once for each leaf, and one more launch that joins the cuts.
Needs Triton: import it where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.cuda.kernels import ask_for
from outrider.runtime.cuda.launch import launch, processors
from outrider.runtime.cuda.reference import MAX_NODES, Fresh, Layout
from outrider.runtime.cuda.same_bits.cuts import add_cut, cut_begin, cut_of, cuts, finish, join
from outrider.runtime.cuda.same_bits.places import (
    branches,
    depths,
    leads,
    node_at,
    on_path,
    sequence,
    sequence_of,
    tile_of,
)
from outrider.runtime.cuda.tree_attention import _absorb, _rotated, _score, many

BLOCK, KEYS = 64, 64  # query rows of a program, keys it looks at together: part of the order
UNITS = 64  # shares of the rows that are stored and whose paths are computed together
TAIL = 2  # cuts that the candidates of a sequence may lie in
LINE = tl.constexpr(64)  # elements of one cache line
_NODES = tl.constexpr(MAX_NODES)


def fits(query: Tensor, keys: Tensor) -> bool:
    """Whether a tile holds all query heads that share a key head."""
    return query.shape[1] // keys.shape[1] <= BLOCK


def tree_attention(
    query: Tensor,  # [1, Hq, T, D], any strides with dense rows
    keys: Tensor,  # [slots, Hk, C, D]
    values: Tensor,  # [slots, Hk, C, Dv]
    layout: Layout,
    scaling: float,
    *,
    window: int | None = None,  # keys at least so far back are out of sight
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] a key without a value
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [1, T, D]: query and fresh keys are rotated as read
    fresh: Fresh | None = None,  # changes state: these rows are stored in the cache
    programs: int | None = None,  # that share a tile's cuts; None: as the chip has room for
) -> Tensor:  # [1, T, Hq, Dv], zeros where a row is padding
    _, heads, rows, dim = query.shape
    key_heads, value_dim = keys.shape[1], values.shape[3]
    group, sequences = heads // key_heads, layout.sequences
    each = BLOCK // group  # rows of a tile
    tiles = triton.cdiv(rows, each) if sequences == 1 else rows // each + sequences
    shared = programs or max(1, min(cuts(keys.shape[2]), 2 * processors(query.device) // (tiles * key_heads)))
    alone = shared == 1  # a program has all cuts of a tile
    places = 1 + TAIL if alone else cuts(keys.shape[2])
    chunk = triton.cdiv(rows, UNITS)
    units = triton.cdiv(rows, chunk)
    wide, wide_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    out = torch.empty((1, rows, heads, value_dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((rows, heads, places, wide_value), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, rows, heads, places), dtype=torch.float32, device=query.device)  # largest, weight
    cos, sin = rotary or (query, query)
    new_key, new_value = (fresh.key, fresh.value) if fresh else (query, query)
    sunk = sinks if sinks is not None else sums
    where = (layout.slots, layout.lengths, layout.nodes, layout.begins, layout.counts, layout.causal, layout.words)
    strides = (
        *query.stride()[1:3], *keys.stride()[:3], *values.stride()[:3], *new_key.stride()[1:3],
        *new_value.stride()[1:3], cos.stride(1),
    )  # fmt: skip
    shape = (
        dim, value_dim, key_heads, group, triton.next_power_of_2(group), layout.words.shape[1], many(sequences), KEYS,
        BLOCK, wide, wide_value, max(16, triton.next_power_of_2(chunk)),
    )  # fmt: skip
    facts = (softcap is not None, window is not None, rotary is not None, sinks is not None, fresh is not None, alone)
    precision = "ieee" if query.dtype in (torch.float32, torch.float64) else "tf32"
    around = {"enable_fp_fusion": False, **launch(query.device)}  # a sum rounds alike wherever it is compiled
    _attend[((tiles + units) * key_heads, shared)](
        query, keys, values, new_key, new_value, cos, sin, *where, sunk, out, partial, sums, *strides, scaling,
        softcap or 1.0, window or 0, sequences, tiles, rows, shared, chunk, places, *shape, *facts, precision,
        num_warps=4 if wide_value <= 128 else 8,
        num_stages=3 if max(dim, value_dim) <= 128 else 2, **around,
    )  # fmt: skip
    join[(rows, key_heads)](
        *where, sunk, out, partial, sums, window or 0, sequences, rows, places, value_dim, key_heads, group,
        triton.next_power_of_2(group), layout.words.shape[1], many(sequences), wide_value, *facts[1:2],
        *facts[3:4], alone, num_warps=4, **around,
    )  # fmt: skip
    return out


@triton.jit
def _of_cut(
    q, low, stop, clear, position, key_base, value_base, new_key, new_value, cos, sin, base, length, first, path,
    scaling, softcap, window, key_row, value_row, new_key_row, new_value_row, cos_row,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    WIDE_VALUE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROTARY: tl.constexpr,
    HAS_FRESH: tl.constexpr, ON_PATH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A cut's softmax for the rows of a tile: positions from `low` up to `stop`, all of them seen up to `clear`."""
    d, dv, t = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE), tl.arange(0, KEYS)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK, WIDE_VALUE], tl.float32)
    masked = low
    if not HAS_WINDOW:
        masked = tl.maximum(low, tl.minimum(clear, stop) // KEYS * KEYS)
        for at in range(low, masked, KEYS):
            place = (at + t)[:, None]
            k = tl.load(key_base + place * key_row + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(value_base + place * value_row + dv[None, :], mask=(dv < VALUE_DIM)[None, :], other=0.0)
            scores = _score(q, k, scaling, softcap, HAS_CAP, PRECISION)
            largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    for at in tl.range(masked, stop, KEYS, num_stages=1):
        seat = at + t  # the positions of the keys
        there = seat < stop
        place = seat  # and where they are stored
        if ON_PATH:
            place = tl.where(seat < length, seat, length + node_at(seat - length, path))
        key_in, value_in = there[:, None] & (d < DIM)[None, :], there[:, None] & (dv < VALUE_DIM)[None, :]
        if HAS_FRESH:
            held = (place < first)[:, None]
            k = tl.load(key_base + place[:, None] * key_row + d[None, :], mask=key_in & held, other=0.0)
            v = tl.load(value_base + place[:, None] * value_row + dv[None, :], mask=value_in & held, other=0.0)
            if at + KEYS > tl.minimum(first, length):  # some may not be in the cache
                new, late = (base + place - first)[:, None], (place >= first)[:, None]
                at_key = new_key + new * new_key_row
                fresh = _rotated(at_key, new * cos_row, cos, sin, key_in & late, d, DIM, HAS_ROTARY)
                k = tl.where(late, fresh, k)
                at_value = new_value + new * new_value_row
                v = tl.where(late, tl.load(at_value + dv[None, :], mask=value_in & late, other=0.0), v)
        else:
            k = tl.load(key_base + place[:, None] * key_row + d[None, :], mask=key_in, other=0.0)
            v = tl.load(value_base + place[:, None] * value_row + dv[None, :], mask=value_in, other=0.0)
        sees = there[None, :] & (seat[None, :] <= position[:, None])
        if HAS_WINDOW:
            sees = sees & (seat[None, :] > position[:, None] - window)
        scores = tl.where(sees, _score(q, k, scaling, softcap, HAS_CAP, PRECISION), float("-inf"))
        largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    return largest, weight, total


@triton.jit
def _keep(partial, sums, half, cell, real, largest, weight, total, dv, WIDE_VALUE: tl.constexpr):
    """What a cut, or several joined, come to for each row."""
    tl.store(sums + cell, largest, mask=real)
    tl.store(sums + half + cell, weight, mask=real)
    tl.store(partial + cell.to(tl.int64)[:, None] * WIDE_VALUE + dv[None, :], total, mask=real[:, None])


@triton.jit(do_not_specialize=("window", "sequences", "tiles", "rows", "shared", "chunk", "places"))
def _attend(
    query, keys, values, new_key, new_value, cos, sin, slots, lengths, nodes, begins, counts, causal, words, sinks, out,
    partial, sums, query_head, query_row, key_slot, key_head, key_row, value_slot, value_head, value_row, new_key_head,
    new_key_row, new_value_head, new_value_row, cos_row, scaling, softcap, window, sequences, tiles, rows, shared,
    chunk, places,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr,
    WORDS: tl.constexpr, MANY: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, WIDE_VALUE: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_ROTARY: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_FRESH: tl.constexpr,
    FOLD: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK // GROUP
    unit, head, part = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    d, dv, cell = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE), tl.arange(0, BLOCK)
    half = rows * HEADS * GROUP * places
    new_key += head * new_key_head
    new_value += head * new_value_head
    inner = cell < ROWS * GROUP  # rows of a tile, a key head's query heads innermost
    query_at = head * GROUP + cell % GROUP
    if unit < tiles:
        batch, tile = 0, unit
        if MANY > 1:
            batch, tile = tile_of(begins, unit, sequences, ROWS, MANY)
        base = tl.load(begins + batch).to(tl.int32)
        room, count = tl.load(begins + batch + 1).to(tl.int32) - base, tl.load(counts + batch).to(tl.int32)
        row = tile * ROWS + cell // GROUP
        real = inner & (row < count)
        at_out = ((base + row) * HEADS * GROUP + query_at)[:, None] * VALUE_DIM + dv[None, :]
        written = (inner & (row < room))[:, None] & (dv < VALUE_DIM)[None, :]
        if tile * ROWS < count:
            length, slot = tl.load(lengths + batch).to(tl.int32), tl.load(slots + batch)
            in_flight = tl.load(nodes + batch).to(tl.int32)
            first = length + in_flight - count  # where the first row stands in the slot
            split = branches(words, base, count, in_flight, tl.load(causal + batch), WORDS)
            end = tl.where(split, cut_begin(cut_of(length)), first + tl.minimum(tile * ROWS + ROWS, count))
            begin = end * 0
            if HAS_WINDOW:
                lowest = tl.where(split, length, first + tile * ROWS)
                begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
            key_base = keys + slot * key_slot + head * key_head
            value_base = values + slot * value_slot + head * value_head
            cut, behind = cut_of(begin) + part, tl.where(end > 0, cut_of(end - 1) + 1, 0)
            if OVERLAP:  # the committed keys were written long before the launch that this one waits for
                t = tl.arange(0, KEYS)
                soon = tl.minimum(cut_begin(cut) + t, tl.maximum(tl.minimum(end, first) - 1, 0))[:, None]
                ask_for(key_base + soon * key_row + tl.arange(0, 2)[None, :] * LINE)
                ask_for(value_base + soon * value_row + tl.arange(0, 2)[None, :] * LINE)
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            # of a tree that branches only whole cuts of text: all of it is seen
            position = tl.where(split, length, first + row)
            inside = real[:, None] & (d < DIM)[None, :]
            start = query + query_at[:, None] * query_head + (base + row)[:, None] * query_row
            q = _rotated(start, (base + row)[:, None] * cos_row, cos, sin, inside, d, DIM, HAS_ROTARY)
            if HAS_WINDOW:  # a candidate's own position counts
                at_depth = length + depths(words, base + row, real, WORDS)
                position = tl.where(split, at_depth, position)
            most = tl.full([BLOCK], float("-inf"), tl.float32)
            mass = tl.zeros([BLOCK], tl.float32)
            whole = tl.zeros([BLOCK, WIDE_VALUE], tl.float32)
            spot = ((base + row) * HEADS * GROUP + query_at) * places
            nowhere = tl.zeros([_NODES], tl.int32)
            for each in range(cut, behind, shared):
                largest, weight, total = _of_cut(
                    q, tl.maximum(cut_begin(each), begin), tl.minimum(cut_begin(each + 1), end), first, position,
                    key_base, value_base, new_key, new_value, cos, sin, base, length, first, nowhere, scaling, softcap,
                    window, key_row, value_row, new_key_row, new_value_row, cos_row, DIM, VALUE_DIM, KEYS, BLOCK, WIDE,
                    WIDE_VALUE, HAS_CAP, HAS_WINDOW, HAS_ROTARY, HAS_FRESH, False, PRECISION,
                )  # fmt: skip
                if FOLD:
                    most, mass, whole = add_cut(most, mass, whole, largest, weight, total)
                else:
                    _keep(partial, sums, half, spot + each, real, largest, weight, total, dv, WIDE_VALUE)
            if FOLD:
                unfinished = tl.where(split, row, count) < count
                _keep(partial, sums, half, spot, real & unfinished, most, mass, whole, dv, WIDE_VALUE)
                value = finish(sinks, query_at, real, most, mass, whole, HAS_SINKS)
                there = written & (tl.where(split, row, count) >= count)[:, None]
                tl.store(out + at_out, tl.where(real[:, None], value, 0.0), mask=there)
            elif part == 0:
                nothing = tl.zeros([BLOCK, WIDE_VALUE], tl.float32)
                tl.store(out + at_out, nothing, mask=written & (row >= count)[:, None])
        elif (tile * ROWS < room) & (part == 0):  # padding alone
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            tl.store(out + at_out, tl.zeros([BLOCK, WIDE_VALUE], tl.float32), mask=written)
    elif part == 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        origin = (unit - tiles) * chunk
        if HAS_FRESH:
            _store(
                keys, values, new_key, new_value, cos, sin, slots, lengths, nodes, begins, counts, origin, chunk, head,
                rows, sequences, key_slot, key_head, key_row, value_slot, value_head, value_row, new_key_row,
                new_value_row, cos_row, DIM, VALUE_DIM, MANY, CHUNKED, WIDE, WIDE_VALUE, HAS_ROTARY,
            )  # fmt: skip
        for here in range(origin, tl.minimum(origin + chunk, rows)):
            batch = sequence_of(begins, here, sequences, MANY)
            base, count = tl.load(begins + batch).to(tl.int32), tl.load(counts + batch).to(tl.int32)
            in_flight = tl.load(nodes + batch).to(tl.int32)
            if (here - base < count) & branches(words, base, count, in_flight, tl.load(causal + batch), WORDS):
                length, slot = tl.load(lengths + batch).to(tl.int32), tl.load(slots + batch)
                first = length + in_flight - count
                one = tl.load(words + here * WORDS)
                two = one
                if WORDS > 1:
                    two = tl.load(words + here * WORDS + 1)
                path = on_path(one, two, WORDS)
                depth = tl.sum(path, 0) - 1
                if leads(words, base, count, in_flight, here - base, depth, ROWS, WORDS):
                    above = depth // ROWS * ROWS + cell // GROUP  # depths of the tile's rows
                    node = node_at(above, path)
                    row = base + node - (in_flight - count)
                    real = inner & (above <= depth) & (node >= in_flight - count)
                    inside = real[:, None] & (d < DIM)[None, :]
                    start = query + query_at[:, None] * query_head + row[:, None] * query_row
                    q = _rotated(start, row[:, None] * cos_row, cos, sin, inside, d, DIM, HAS_ROTARY)
                    key_base = keys + slot * key_slot + head * key_head
                    value_base = values + slot * value_slot + head * value_head
                    tail, end = cut_of(length), length + depth + 1
                    begin = end * 0
                    if HAS_WINDOW:
                        begin = tl.maximum(length + depth // ROWS * ROWS - window + 1, 0) // KEYS * KEYS
                    spot = (row * HEADS * GROUP + query_at) * places
                    for each in range(tail, cut_of(end - 1) + 1):
                        largest, weight, total = _of_cut(
                            q, tl.maximum(cut_begin(each), begin), tl.minimum(cut_begin(each + 1), end), length,
                            length + above, key_base, value_base, new_key, new_value, cos, sin, base, length, first,
                            path, scaling, softcap, window, key_row, value_row, new_key_row, new_value_row, cos_row,
                            DIM, VALUE_DIM, KEYS, BLOCK, WIDE, WIDE_VALUE, HAS_CAP, HAS_WINDOW, HAS_ROTARY, HAS_FRESH,
                            True, PRECISION,
                        )  # fmt: skip
                        to = each
                        if FOLD:
                            to = each - tail + 1
                        _keep(partial, sums, half, spot + to, real, largest, weight, total, dv, WIDE_VALUE)


@triton.jit
def _store(
    keys, values, new_key, new_value, cos, sin, slots, lengths, nodes, begins, counts, origin, chunk, head, rows,
    sequences, key_slot, key_head, key_row, value_slot, value_head, value_row, new_key_row, new_value_row, cos_row,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MANY: tl.constexpr, CHUNKED: tl.constexpr,
    WIDE: tl.constexpr, WIDE_VALUE: tl.constexpr, HAS_ROTARY: tl.constexpr,
):  # fmt: skip
    """Rows of the pass become rows of their slots."""
    d, dv, i = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE), tl.arange(0, CHUNKED)
    row = origin + i
    batch = sequence(begins, tl.minimum(row, rows - 1), sequences, MANY)
    local, count = row - tl.load(begins + batch).to(tl.int32), tl.load(counts + batch).to(tl.int32)
    there = (i < chunk) & (row < rows) & (local < count)
    place = tl.load(lengths + batch) + tl.load(nodes + batch) - count + local
    slot = tl.load(slots + batch)
    key_in, value_in = there[:, None] & (d < DIM)[None, :], there[:, None] & (dv < VALUE_DIM)[None, :]
    start = new_key + row[:, None] * new_key_row
    k = _rotated(start, row[:, None] * cos_row, cos, sin, key_in, d, DIM, HAS_ROTARY)
    to = keys + (slot * key_slot + head * key_head + place * key_row)[:, None] + d[None, :]
    tl.store(to, k, mask=key_in)
    v = tl.load(new_value + row[:, None] * new_value_row + dv[None, :], mask=value_in, other=0.0)
    to = values + (slot * value_slot + head * value_head + place * value_row)[:, None] + dv[None, :]
    tl.store(to, v, mask=value_in)
