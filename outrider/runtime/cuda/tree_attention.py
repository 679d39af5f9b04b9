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
VARYING = ("window", "rows")  # one compiled kernel for all of their values
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
    query: Tensor,  # [B, Hq, R, D], any strides with dense rows
    keys: Tensor,  # [slots, Hk, C, D]
    values: Tensor,  # [slots, Hk, C, Dv]
    layout: Layout,
    scaling: float,
    *,
    window: int | None = None,  # keys at least so far back are out of sight; must exceed the trees' depth
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq] a key without a value
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [B, R, D]: query and fresh keys are rotated as read
    fresh: Fresh | None = None,  # changes state: these rows are stored in the cache
    tiling: AttentionTiling | None = None,
) -> Tensor:  # [B, R, Hq, Dv]
    batch, heads, rows, dim = query.shape
    key_heads, value_dim = keys.shape[1], values.shape[3]
    group = heads // key_heads
    plain = tiling is None and window is None and softcap is None and sinks is None
    if plain and fresh is not None and hopper(query.device):
        from outrider.runtime.cuda import hopper_attention

        if hopper_attention.fits(query, keys, values):
            return hopper_attention.tree_attention(query, keys, values, layout, scaling, fresh, rotary)
    how = tiling or _tiling(
        batch * key_heads, group * rows, keys.shape[2], max(dim, value_dim), query.element_size(), query.device
    )
    tiles = triton.cdiv(group * rows, how.block)
    wide, wide_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    out = torch.empty((batch, rows, heads, value_dim), dtype=query.dtype, device=query.device)
    space = (batch * key_heads * tiles, how.splits, how.block)
    partial = torch.empty((*space, wide_value), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, *space), dtype=torch.float32, device=query.device)  # maximum, weight
    cos, sin = rotary or (query, query)
    new_key, new_value, places = (fresh.key, fresh.value, fresh.places) if fresh else (query, query, layout.positions)
    arrivals = counters(query.device, space[0])
    _attend[(batch * key_heads, how.splits, tiles)](
        query, keys, values, new_key, new_value, cos, sin, layout.slots, layout.lengths, layout.nodes, layout.positions,
        layout.words, places, sinks if sinks is not None else sums, out, partial, sums, arrivals,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *new_key.stride()[:3], *new_value.stride()[:3],
        *cos.stride()[:2], scaling, softcap or 1.0, window or 0, rows, dim, value_dim, key_heads, group,
        layout.words.shape[2], how.keys, how.block, triton.next_power_of_2(how.splits), wide, wide_value,
        softcap is not None, window is not None, rotary is not None, sinks is not None, fresh is not None,
        how.stages, _precision(query), num_warps=how.warps, num_stages=how.stages, **launch(query.device),
    )  # fmt: skip
    return out


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


@triton.jit(do_not_specialize=VARYING)
def _attend(
    query, keys, values, new_key, new_value, cos, sin, slots, lengths, nodes, positions, words, places, sinks, out,
    partial, sums, counters,
    query_batch, query_head, query_row, key_slot, key_head, key_row, value_slot, value_head, value_row,
    new_key_batch, new_key_head, new_key_row, new_value_batch, new_value_head, new_value_row, cos_batch, cos_row,
    scaling, softcap, window, rows,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, WIDE_VALUE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROTARY: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_FRESH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    part, tile = tl.program_id(1), tl.program_id(2)
    length, count, slot = tl.load(lengths + batch), tl.load(nodes + batch), tl.load(slots + batch)
    end, begin = length + count, length * 0
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
        end = tl.minimum(end, tl.load(places + batch * rows))  # where the first fresh row is to stand
        high = tl.maximum(tl.minimum(stop, end), low)
    folded = tile * BLOCK + tl.arange(0, BLOCK)  # the query heads of a key head, rows innermost
    row, real = folded % rows, folded < GROUP * rows
    query_at = head * GROUP + folded // rows
    d, dv, t = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE), tl.arange(0, KEYS)
    key_base = keys + slot * key_slot + head * key_head
    value_base = values + slot * value_slot + head * value_head
    position = tl.load(positions + batch * rows + row, mask=real, other=0)
    word = words + (batch * rows + row) * WORDS
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
    start = query + batch * query_batch + query_at[:, None] * query_head + row[:, None] * query_row
    q = _rotated(start, batch * cos_batch + row[:, None] * cos_row, cos, sin, inside, d, DIM, HAS_ROTARY)
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
        there = (place < high)[:, None]
        k = tl.load(key_base + place[:, None] * key_row + d[None, :], mask=there & (d < DIM)[None, :], other=0.0)
        v = tl.load(
            value_base + place[:, None] * value_row + dv[None, :], mask=there & (dv < VALUE_DIM)[None, :], other=0.0
        )
        committed = (place < length)[None, :]
        if HAS_WINDOW:
            committed = committed & (place[None, :] > position[:, None] - window)
        flying = ((place >= length) & (place < high))[None, :]
        sees = committed | (flying & _bit(first, second, place - length, WORDS))
        scores = tl.where(sees, _score(q, k, scaling, softcap, HAS_CAP, PRECISION), float("-inf"))
        largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    if HAS_FRESH:
        for at in tl.range(high, stop, KEYS, num_stages=1):
            place = at + t
            new = (place - end)[:, None]
            there = (place < stop)[:, None]
            key_there, value_there = there & (d < DIM)[None, :], there & (dv < VALUE_DIM)[None, :]
            at_key = new_key + batch * new_key_batch + head * new_key_head + new * new_key_row
            k = _rotated(at_key, batch * cos_batch + new * cos_row, cos, sin, key_there, d, DIM, HAS_ROTARY)
            at_value = new_value + batch * new_value_batch + head * new_value_head + new * new_value_row
            v = tl.load(at_value + dv[None, :], mask=value_there, other=0.0)
            if tile == 0:
                tl.store(key_base + place[:, None] * key_row + d[None, :], k, mask=key_there)
                tl.store(value_base + place[:, None] * value_row + dv[None, :], v, mask=value_there)
            sees = (place < stop)[None, :] & _bit(first, second, place - length, WORDS)
            scores = tl.where(sees, _score(q, k, scaling, softcap, HAS_CAP, PRECISION), float("-inf"))
            largest, weight, total = _absorb(scores, v, largest, weight, total, PRECISION)
    last = True
    if parts > 1:  # whoever comes last joins the parts, always in the same order
        unit = tl.program_id(0) * tl.num_programs(2) + tile
        cell = tl.arange(0, BLOCK)
        half = tl.num_programs(0) * tl.num_programs(2) * tl.num_programs(1) * BLOCK
        at_sums = sums + unit * tl.num_programs(1) * BLOCK
        at_partial = partial + unit.to(tl.int64) * tl.num_programs(1) * BLOCK * WIDE_VALUE
        at_partial += cell[:, None] * WIDE_VALUE + dv[None, :]
        tl.store(at_sums + part * BLOCK + cell, largest)
        tl.store(at_sums + half + part * BLOCK + cell, weight)
        tl.store(at_partial + part * BLOCK * WIDE_VALUE, total, mask=real[:, None])
        tl.debug_barrier()
        last = tl.atomic_add(counters + unit, 1, sem="acq_rel") == parts - 1
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
                mine = tl.sum(tl.where((p == i)[:, None], scale, 0.0), 0)
                one = tl.load(at_partial + i * BLOCK * WIDE_VALUE, mask=real[:, None], other=0.0, cache_modifier=".cg")
                total += one * mine[:, None]
            tl.store(counters + unit, 0)
    if last:
        if HAS_SINKS:
            sink = tl.load(sinks + query_at, mask=real, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(largest, sink)
            fade = tl.exp2(largest - top)
            total = total * fade[:, None]
            weight = weight * fade + tl.exp2(sink - top)
        value = total / tl.where(weight > 0, weight, 1.0)[:, None]  # a padded row sees nothing: zeros
        at_out = ((batch * rows + row) * HEADS * GROUP + query_at) * VALUE_DIM
        tl.store(out + at_out[:, None] + dv[None, :], value, mask=real[:, None] & (dv < VALUE_DIM)[None, :])
