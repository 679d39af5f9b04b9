"""Tree attention in Triton: rows of many token trees over a slot cache, split over the context as in flash decoding.

Every program reads one stretch of one sequence's keys for all query heads that share them and keeps a partial softmax;
a second kernel joins the stretches (Dao et al., Flash-Decoding). A row sees the committed prefix and, by one bit a
node, itself and its ancestors. Lengths are read on the device, so one captured launch serves every context. Exact up to
summation order; costs the cache read once for each tile of 128 rows. Needs Triton: import it where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.target.graphed_launch import launch, processors
from outrider.target.graphed_reference import Layout

KEYS = 64  # keys a program looks at together
VARYING = ("sums_half", "window", "rows", "splits")  # one compiled kernel for all of their values


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
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [B, R, D]: the query is turned as it is read
) -> Tensor:  # [B, R, Hq, Dv]
    batch, heads, rows, dim = query.shape
    key_heads, value_dim = keys.shape[1], values.shape[3]
    group = heads // key_heads
    folded = group * rows
    block = min(128, max(16, triton.next_power_of_2(folded)))
    tiles = triton.cdiv(folded, block)
    resident = processors(query.device) * max(1, 128 // max(block, 32))  # programs of such a block on the chip at once
    splits = min(64, max(1, resident // (batch * key_heads * tiles)), triton.cdiv(keys.shape[2], KEYS))
    out = torch.empty((batch, rows, heads, value_dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((batch, heads, rows, splits, value_dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, batch, heads, rows, splits), dtype=torch.float32, device=query.device)  # maximum, weight
    cos, sin = rotary or (query, query)
    wide, wide_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    _partial[(batch * key_heads, splits, tiles)](
        query, keys, values, cos, sin, layout.slots, layout.lengths, layout.nodes, layout.positions, layout.words,
        partial, sums, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *cos.stride()[:2],
        sums.stride(0), scaling, softcap or 1.0, window or 0, rows, splits, dim, value_dim, key_heads, group,
        layout.words.shape[2], KEYS, block, wide, wide_value, softcap is not None, window is not None,
        rotary is not None, _precision(query), num_warps=8 if block == 128 else 4, num_stages=2,
        **launch(query.device),
    )  # fmt: skip
    _join[(batch, rows, heads)](
        partial, sums, layout.lengths, layout.nodes, sinks if sinks is not None else partial, out, sums.stride(0),
        window or 0, rows, splits, value_dim, heads, KEYS, triton.next_power_of_2(splits), wide_value,
        sinks is not None, window is not None, num_warps=4, **launch(query.device),
    )  # fmt: skip
    return out


def _precision(like: Tensor) -> str:
    return "ieee" if like.dtype in (torch.float32, torch.float64) else "tf32"


@triton.jit
def _span(lengths, nodes, batch, window, splits, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Committed length, end of what can be seen, its first block, and keys of one split."""
    length = tl.load(lengths + batch)
    end = length + tl.load(nodes + batch)
    begin = length * 0
    if HAS_WINDOW:  # every row stands at `length` or later
        begin = tl.maximum(length - window + 1, 0) // KEYS * KEYS
    chunk = tl.cdiv(tl.cdiv(end - begin, splits), KEYS) * KEYS
    return length, end, begin, chunk


@triton.jit(do_not_specialize=VARYING)
def _partial(
    query, keys, values, cos, sin, slots, lengths, nodes, positions, words, partial, sums,
    query_batch, query_head, query_row, key_slot, key_head, key_row, value_slot, value_head, value_row,
    cos_batch, cos_row, sums_half, scaling, softcap, window, rows, splits,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    WIDE_VALUE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROTARY: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    split = tl.program_id(1)
    length, end, begin, chunk = _span(lengths, nodes, batch, window, splits, KEYS, HAS_WINDOW)
    low = begin + split * chunk
    high = tl.minimum(low + chunk, end)
    if low >= high:
        return
    folded = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)  # the query heads of a key head, rows innermost
    row, real = folded % rows, folded < GROUP * rows
    query_at = head * GROUP + folded // rows
    d, dv, t = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE), tl.arange(0, KEYS)
    inside = real[:, None] & (d < DIM)[None, :]
    start = query + batch * query_batch + query_at[:, None] * query_head + row[:, None] * query_row
    q = tl.load(start + d[None, :], mask=inside, other=0.0)
    if HAS_ROTARY:
        turn = batch * cos_batch + row[:, None] * cos_row + d[None, :]
        half: tl.constexpr = DIM // 2
        other = tl.load(start + tl.where(d < half, d + half, d - half)[None, :], mask=inside, other=0.0)
        other = tl.where((d < half)[None, :], -other, other).to(tl.float32)
        c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        q = (q.to(tl.float32) * c + other * s).to(q.dtype)
    slot = tl.load(slots + batch)
    key_base = keys + slot * key_slot + head * key_head
    value_base = values + slot * value_slot + head * value_head
    position = tl.load(positions + batch * rows + row, mask=real, other=0)
    word = words + (batch * rows + row) * WORDS
    first = tl.load(word, mask=real, other=0)
    second = first
    if WORDS > 1:
        second = tl.load(word + 1, mask=real, other=0)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK, WIDE_VALUE], tl.float32)
    plain = low  # blocks below it need no mask
    if not HAS_WINDOW:
        plain = tl.maximum(low, tl.minimum(high, length) // KEYS * KEYS)
        for at in range(low, plain, KEYS):
            place = at + t
            k = tl.load(key_base + place[:, None] * key_row + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
            if HAS_CAP:
                scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
            top = tl.maximum(largest, tl.max(scores, 1))
            p = tl.exp(scores - top[:, None])
            fade = tl.exp(largest - top)
            v = tl.load(
                value_base + place[:, None] * value_row + dv[None, :], mask=(dv < VALUE_DIM)[None, :], other=0.0
            )
            total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            weight = weight * fade + tl.sum(p, 1)
            largest = top
    for at in range(plain, high, KEYS):
        place = at + t
        there = (place < high)[:, None]
        k = tl.load(key_base + place[:, None] * key_row + d[None, :], mask=there & (d < DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if HAS_CAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        node = place - length
        committed = (place < length)[None, :]
        if HAS_WINDOW:
            committed = committed & (place[None, :] > position[:, None] - window)
        bits = first[:, None] >> tl.where((node >= 0) & (node < 64), node, 0)[None, :]
        if WORDS > 1:
            later = second[:, None] >> tl.where(node >= 64, node - 64, 0)[None, :]
            bits = tl.where((node >= 64)[None, :], later, bits)
        sees = committed | (((place >= length) & (place < high))[None, :] & ((bits & 1) != 0))
        scores = tl.where(sees, scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
        p = tl.exp(scores - anchor[:, None])
        fade = tl.exp(largest - anchor)
        v = tl.load(
            value_base + place[:, None] * value_row + dv[None, :], mask=there & (dv < VALUE_DIM)[None, :], other=0.0
        )
        total = total * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        weight = weight * fade + tl.sum(p, 1)
        largest = top
    out = ((batch * HEADS * GROUP + query_at) * rows + row) * splits + split
    tl.store(sums + out, largest, mask=real)
    tl.store(sums + sums_half + out, weight, mask=real)
    tl.store(partial + out[:, None] * VALUE_DIM + dv[None, :], total, mask=real[:, None] & (dv < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=VARYING)
def _join(
    partial, sums, lengths, nodes, sinks, out, sums_half, window, rows, splits,
    VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, WIDE_SPLITS: tl.constexpr,
    WIDE_VALUE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, end, begin, chunk = _span(lengths, nodes, batch, window, splits, KEYS, HAS_WINDOW)
    split, dv = tl.arange(0, WIDE_SPLITS), tl.arange(0, WIDE_VALUE)
    used = (split < splits) & (begin + split * chunk < end)
    at = ((batch * HEADS + head) * rows + row) * splits + split
    largest = tl.load(sums + at, mask=used, other=float("-inf"))
    weight = tl.load(sums + sums_half + at, mask=used, other=0.0)
    top = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    scale = tl.where(used, tl.exp(largest - top), 0.0)
    whole = tl.sum(scale * weight, 0)
    if HAS_SINKS:
        whole += tl.exp(sink - top)
    parts = tl.load(
        partial + at[:, None] * VALUE_DIM + dv[None, :], mask=used[:, None] & (dv < VALUE_DIM)[None, :], other=0.0
    )
    value = tl.sum(parts * scale[:, None], 0) / tl.where(whole > 0, whole, 1.0)  # a padded row sees nothing: zeros
    tl.store(out + ((batch * rows + row) * HEADS + head) * VALUE_DIM + dv, value, mask=dv < VALUE_DIM)
