"""Tree attention in Triton: rows of many token trees over a slot cache, split over the context as in flash decoding.

Every program reads one stretch of one sequence's keys for all query heads that share them and keeps a partial softmax;
whoever comes last joins the stretches (Dao et al., Flash-Decoding). Rows that are not in the cache yet are rotated and
stored by the program in whose stretch they stand. A row sees the committed prefix and, by one bit a node, itself and
its ancestors. Lengths are read on the device, so one captured launch serves every context. Exact up to summation order,
which is fixed; costs the cache read once for each tile of query rows. Wide trees on Hopper have a kernel of their own
(`hopper_attention.py`). Needs Triton: import it where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.cuda.kernels import ask_for
from outrider.runtime.cuda.launch import counters, hopper, launch, processors, shared_bytes
from outrider.runtime.cuda.reference import Fresh, Layout

SHORT = 2048  # tokens that a slot holds: how the work is cut is chosen by it
VARYING = ("window", "sequences")  # one compiled kernel for all of their values
LINE = tl.constexpr(64)  # elements of one cache line
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How the work is cut; found by timing heads of 128 on an H200."""

    block: int  # query rows of one program: those of all query heads that share a key head
    splits: int  # stretches of the context
    keys: int = 64  # keys it looks at together
    warps: int = 4
    stages: int = 2


def tree_attention(
    query: Tensor,  # [1, Hq, T, D], any strides with dense rows
    keys: Tensor,  # [slots, Hk, C, D]
    values: Tensor,  # [slots, Hk, C, Dv]
    layout: Layout,
    scaling: float,
    *,
    window: int | None = None,  # keys at least so far back are out of sight; must exceed the trees' depth
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] a key without a value
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [1, T, D]: query and fresh keys are rotated as read
    fresh: Fresh | None = None,  # changes state: these rows are stored in the cache
    tiling: AttentionTiling | None = None,
) -> Tensor:  # [1, T, Hq, Dv], zeros where a row is padding
    _, heads, rows, dim = query.shape
    key_heads, value_dim = keys.shape[1], values.shape[3]
    group, sequences = heads // key_heads, layout.sequences
    plain = tiling is None and window is None and softcap is None and sinks is None
    if plain and fresh is not None and hopper(query.device):
        from outrider.runtime.cuda import hopper_attention

        if hopper_attention.fits(query, keys, values, layout):
            return hopper_attention.tree_attention(query, keys, values, layout, scaling, fresh, rotary)
    how = tiling or _tiling(
        sequences * key_heads, group * triton.cdiv(rows, sequences), keys.shape[2], max(dim, value_dim),
        query.element_size(), query.device,
    )  # fmt: skip
    units = tiles(sequences, group * rows, how.block)
    wide, wide_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    out = torch.empty((1, rows, heads, value_dim), dtype=query.dtype, device=query.device)
    space = (units * key_heads, how.splits, how.block)
    partial = torch.empty((*space, wide_value), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, *space), dtype=torch.float32, device=query.device)  # maximum, weight
    cos, sin = rotary or (query, query)
    new_key, new_value = (fresh.key, fresh.value) if fresh else (query, query)
    arrivals = counters(query.device, space[0])
    _attend[(units * key_heads, how.splits)](
        query, keys, values, new_key, new_value, cos, sin, layout.slots, layout.lengths, layout.nodes, layout.begins,
        layout.counts, layout.causal, layout.positions, layout.words, sinks if sinks is not None else sums, out,
        partial, sums, arrivals, *query.stride()[1:3], *keys.stride()[:3], *values.stride()[:3],
        *new_key.stride()[1:3], *new_value.stride()[1:3], cos.stride(1), scaling, softcap or 1.0, window or 0,
        sequences, dim, value_dim, key_heads, group, layout.words.shape[1], many(sequences), how.keys, how.block,
        triton.next_power_of_2(how.splits), wide, wide_value, softcap is not None, window is not None,
        rotary is not None, sinks is not None, fresh is not None, how.stages, _precision(query), num_warps=how.warps,
        num_stages=how.stages, **launch(query.device),
    )  # fmt: skip
    return out


def tiles(sequences: int, folded: int, block: int) -> int:
    """Tiles of `block` query rows that so many sequences may take at most, however the rows are shared out: the tiles
    of a sequence begin at the number of whole ones before its first row, and one more for each sequence before it."""
    return triton.cdiv(folded, block) if sequences == 1 else folded // block + sequences


def many(sequences: int) -> int:
    """How many sequences a program looks through to find its own: one compiled kernel for most numbers of them."""
    return 1 if sequences == 1 else max(64, triton.next_power_of_2(sequences))


def _tiling(groups: int, folded: int, capacity: int, dim: int, size: int, device: torch.device) -> AttentionTiling:
    """Short contexts: small tiles, for latency is all. Long ones: larger tiles, which read the keys less often."""
    chips, short = processors(device), capacity <= SHORT
    block = min(64, max(16, triton.next_power_of_2(folded)))
    while short and block > 16 and groups * triton.cdiv(folded, block // 2) <= chips:
        block //= 2
    programs = groups * triton.cdiv(folded, block)
    splits = chips // programs
    if block > 16:
        splits = 1 if short else min(8, 2 * chips // programs)  # joining more costs more than reading less saves
        keys, warps, stages = (32, 4, 4) if short else (64, 4, 3)
    elif splits > 2:
        keys, warps, stages = (64, 8, 2) if short else (128, 8, 3)
    else:
        splits, keys, warps, stages = 2, 64, 4, 3
    room = (shared_bytes(device) - 8192) // size - block * dim  # elements
    stages = max(1, min(stages, room // (2 * keys * dim)))
    return AttentionTiling(block, max(1, min(splits, triton.cdiv(capacity, keys))), keys, warps, stages)


def _precision(like: Tensor) -> str:
    return "ieee" if like.dtype in (torch.float32, torch.float64) else "tf32"


@triton.jit
def _absorb(scores, v, largest, weight, total, PRECISION: tl.constexpr):
    """Scores (base 2) and values of some keys into the running softmax."""
    top = tl.maximum(largest, tl.max(scores, 1))
    anchor = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    p = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(largest - anchor)
    total = tl.dot(p.to(v.dtype), v, total * fade[:, None], input_precision=PRECISION)
    return top, weight * fade + tl.sum(p, 1), total


@triton.jit
def _score(q, k, scaling, softcap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores to the base 2."""
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_CAP:
        product = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scaling * product / softcap)) - 1.0)
        return product * LOG2E
    return product * (scaling * LOG2E)


@triton.jit
def _bit(first, second, node, WORDS: tl.constexpr):
    """[rows, keys]: whether a row sees a node in flight, by the words of its mask."""
    bits = first[:, None] >> tl.where((node >= 0) & (node < 64), node, 0)[None, :]
    if WORDS > 1:
        later = second[:, None] >> tl.where((node >= 64) & (node < 128), node - 64, 0)[None, :]
        bits = tl.where((node >= 64)[None, :], later, bits)
    return (bits & 1) != 0


@triton.jit
def _rotated(start, angle, cos, sin, inside, d, DIM: tl.constexpr, HAS_ROTARY: tl.constexpr):
    """Rows at `start`, rotated by the angles at `angle`."""
    x = tl.load(start + d[None, :], mask=inside, other=0.0)
    if HAS_ROTARY:
        half: tl.constexpr = DIM // 2
        across = tl.where(d < half, d + half, d - half)
        if half % 8 == 0:
            across = tl.max_contiguous(tl.multiple_of(across, 8), 8)
        other = tl.load(start + across[None, :], mask=inside, other=0.0)
        other = tl.where((d < half)[None, :], -other, other).to(tl.float32)
        c = tl.load(cos + angle + d[None, :], mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle + d[None, :], mask=inside, other=0.0).to(tl.float32)
        return (x.to(tl.float32) * c + other * s).to(x.dtype)
    return x


@triton.jit
def _seen(
    first, second, place, there, length, bound, position, window, WORDS: tl.constexpr, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """[rows, keys]: which of the keys at `place` a row sees: as text those below its bound, of a tree by its words."""
    text = place[None, :] < bound[:, None]
    if HAS_WINDOW:
        text = text & (place[None, :] > position[:, None] - window)
    return there[None, :] & (text | ((place >= length)[None, :] & _bit(first, second, place - length, WORDS)))


@triton.jit
def _whose(begins, unit, sequences, GROUP: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """The sequence that a tile belongs to, and which of its tiles it is: see `tiles`."""
    each = tl.arange(0, MANY)
    starts = tl.load(begins + each, mask=each < sequences, other=1 << 20).to(tl.int32) * GROUP // BLOCK + each
    sequence = tl.sum((starts <= unit).to(tl.int32), 0) - 1
    return sequence, unit - tl.max(tl.where(starts <= unit, starts, 0), 0)


@triton.jit(do_not_specialize=VARYING)
def _attend(
    query, keys, values, new_key, new_value, cos, sin, slots, lengths, nodes, begins, counts, causal, positions, words,
    sinks, out, partial, sums, counters,
    query_head, query_row, key_slot, key_head, key_row, value_slot, value_head, value_row,
    new_key_head, new_key_row, new_value_head, new_value_row, cos_row, scaling, softcap, window, sequences,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
    MANY: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
    WIDE_VALUE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROTARY: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_FRESH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    unit, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    part, batch, tile = tl.program_id(1), 0, unit
    if MANY > 1:
        batch, tile = _whose(begins, unit, sequences, GROUP, BLOCK, MANY)
    base = tl.load(begins + batch).to(tl.int32)  # of the pass; rows are counted from here on
    room, count = tl.load(begins + batch + 1).to(tl.int32) - base, tl.load(counts + batch).to(tl.int32)
    if tile * BLOCK >= room * GROUP:
        return
    folded = tile * BLOCK + tl.arange(0, BLOCK)  # rows, the query heads of a key head innermost
    row, real = folded // GROUP, folded < GROUP * count
    query_at = head * GROUP + folded % GROUP
    d, dv, t = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE), tl.arange(0, KEYS)
    written = (folded < GROUP * room)[:, None] & (dv < VALUE_DIM)[None, :]
    if tile * BLOCK >= count * GROUP:  # padding alone
        if part == 0:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            at_out = ((base + row) * HEADS * GROUP + query_at) * VALUE_DIM
            tl.store(out + at_out[:, None] + dv[None, :], tl.zeros([BLOCK, WIDE_VALUE], tl.float32), mask=written)
        return
    length, slot = tl.load(lengths + batch), tl.load(slots + batch)
    begin, whole = length * 0, length + tl.load(nodes + batch)
    fresh = whole - count  # where the first row stands in the slot; those before it are in the cache
    is_text = tl.load(causal + batch) != 0
    end = whole
    if is_text:  # nothing behind the last row of the tile is seen
        end = fresh + tl.minimum((tile * BLOCK + BLOCK - 1) // GROUP + 1, count)
    if HAS_WINDOW:  # every row stands at `length` or later
        begin = tl.maximum(length - window + 1, 0) // KEYS * KEYS
    chunk = tl.maximum(tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), KEYS), 1) * KEYS
    parts = tl.maximum(tl.cdiv(end - begin, chunk), 1)  # stretches with something in them
    if part >= parts:
        return
    low = begin + part * chunk
    stop = tl.minimum(low + chunk, end)
    high = stop  # of what the cache holds
    if HAS_FRESH:
        high = tl.maximum(tl.minimum(stop, fresh), low)
    key_base = keys + slot * key_slot + head * key_head
    value_base = values + slot * value_slot + head * value_head
    position = tl.load(positions + base + row, mask=real, other=0)
    bound = tl.where(is_text, fresh + row + 1, length)
    word = words + (base + row) * WORDS
    first = tl.load(word, mask=real, other=0)
    second = first
    if WORDS > 1:
        second = tl.load(word + 1, mask=real, other=0)
    if OVERLAP:  # the committed keys were written long before the launch that this one waits for
        soon = tl.minimum(low + t, tl.maximum(high - 1, 0))[:, None]
        ask_for(key_base + soon * key_row + tl.arange(0, 2)[None, :] * LINE)
        ask_for(value_base + soon * value_row + tl.arange(0, 2)[None, :] * LINE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = real[:, None] & (d < DIM)[None, :]
    start = query + query_at[:, None] * query_head + (base + row)[:, None] * query_row
    q = _rotated(start, (base + row)[:, None] * cos_row, cos, sin, inside, d, DIM, HAS_ROTARY)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK, WIDE_VALUE], tl.float32)
    plain = low  # blocks below it need no mask
    if not HAS_WINDOW:
        plain = tl.maximum(low, tl.minimum(high, length) // KEYS * KEYS)
        for at in range(low, plain, KEYS):
            place = (at + t)[:, None]
            k = tl.load(key_base + place * key_row + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(value_base + place * value_row + dv[None, :], mask=(dv < VALUE_DIM)[None, :], other=0.0)
            scores = _score(q, k, scaling, softcap, HAS_CAP, PRECISION)
            largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    for at in tl.range(plain, high, KEYS, num_stages=STAGES if HAS_WINDOW else 1):
        place = at + t
        there = place < high
        k = tl.load(
            key_base + place[:, None] * key_row + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0
        )
        v = tl.load(
            value_base + place[:, None] * value_row + dv[None, :], mask=there[:, None] & (dv < VALUE_DIM)[None, :],
            other=0.0,
        )  # fmt: skip
        sees = _seen(first, second, place, there, length, bound, position, window, WORDS, HAS_WINDOW)
        scores = tl.where(sees, _score(q, k, scaling, softcap, HAS_CAP, PRECISION), float("-inf"))
        largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    if HAS_FRESH:
        stores = tile == (count * GROUP - 1) // BLOCK  # the last tile sees all of them, in a tree and in a text
        for at in tl.range(high, stop, KEYS, num_stages=1):
            place = at + t
            there = place < stop
            new = (base + place - fresh)[:, None]
            key_there, value_there = there[:, None] & (d < DIM)[None, :], there[:, None] & (dv < VALUE_DIM)[None, :]
            at_key = new_key + head * new_key_head + new * new_key_row
            k = _rotated(at_key, new * cos_row, cos, sin, key_there, d, DIM, HAS_ROTARY)
            at_value = new_value + head * new_value_head + new * new_value_row
            v = tl.load(at_value + dv[None, :], mask=value_there, other=0.0)
            if stores:
                tl.store(key_base + place[:, None] * key_row + d[None, :], k, mask=key_there)
                tl.store(value_base + place[:, None] * value_row + dv[None, :], v, mask=value_there)
            sees = _seen(first, second, place, there, length, bound, position, window, WORDS, HAS_WINDOW)
            scores = tl.where(sees, _score(q, k, scaling, softcap, HAS_CAP, PRECISION), float("-inf"))
            largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    last = True
    if parts > 1:  # whoever comes last joins the parts, always in the same order
        mine = tl.program_id(0)
        cell = tl.arange(0, BLOCK)
        half = tl.num_programs(0) * tl.num_programs(1) * BLOCK
        at_sums = sums + mine * tl.num_programs(1) * BLOCK
        at_partial = partial + mine.to(tl.int64) * tl.num_programs(1) * BLOCK * WIDE_VALUE
        at_partial += cell[:, None] * WIDE_VALUE + dv[None, :]
        tl.store(at_sums + part * BLOCK + cell, largest)
        tl.store(at_sums + half + part * BLOCK + cell, weight)
        tl.store(at_partial + part * BLOCK * WIDE_VALUE, total, mask=real[:, None])
        tl.debug_barrier()
        last = tl.atomic_add(counters + mine, 1, sem="acq_rel") == parts - 1
        if last:
            p = tl.arange(0, PARTS)
            there = (p < parts)[:, None]
            each = at_sums + p[:, None] * BLOCK + cell[None, :]
            tops = tl.load(each, mask=there, other=float("-inf"), cache_modifier=".cg")
            weights = tl.load(each + half, mask=there, other=0.0, cache_modifier=".cg")
            largest = tl.max(tops, 0)
            scale = tl.exp2(tops - tl.where(largest == float("-inf"), 0.0, largest)[None, :])
            weight = tl.sum(scale * weights, 0)
            total = tl.zeros([BLOCK, WIDE_VALUE], tl.float32)
            for i in tl.range(0, parts, num_stages=3):
                share = tl.sum(tl.where((p == i)[:, None], scale, 0.0), 0)
                one = tl.load(at_partial + i * BLOCK * WIDE_VALUE, mask=real[:, None], other=0.0, cache_modifier=".cg")
                total += one * share[:, None]
            tl.store(counters + mine, 0)
    if last:
        if HAS_SINKS:
            sink = tl.load(sinks + query_at, mask=real, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(largest, sink)
            fade = tl.exp2(largest - top)
            total = total * fade[:, None]
            weight = weight * fade + tl.exp2(sink - top)
        value = total / tl.where(weight > 0, weight, 1.0)[:, None]
        at_out = ((base + row) * HEADS * GROUP + query_at) * VALUE_DIM
        tl.store(out + at_out[:, None] + dv[None, :], tl.where(real[:, None], value, 0.0), mask=written)
