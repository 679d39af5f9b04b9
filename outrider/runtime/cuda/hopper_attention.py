"""Tree attention of wide trees on Hopper, in Gluon: keys and values come through shared memory in a ring.

As `tree_attention.py`, which it stands in for where 64 query rows or more share their keys: every program takes 64 of
them and one stretch of the context, asks the copy engine for the first committed keys before the launch waits for the
queries, and joins its share of the rows when all stretches have come. Rows that are not in the cache yet, and what is
left of a block, go by way of registers, where they are rotated, masked and stored. Exact up to summation order, which
is fixed; costs the cache read once for each 64 query rows. Needs Triton with Gluon: import it where `launch.hopper`
says so.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.runtime.cuda.launch import launch, processors, rounds
from outrider.runtime.cuda.reference import Fresh, Layout
from outrider.runtime.cuda.tree_attention import SHORT

BLOCK, KEYS = 64, 64  # query rows of a program, keys it looks at together
PATIENCE = 64  # looks at whether the other stretches have come
LOG2E = gl.constexpr(1.4426950408889634)


def fits(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether this is a case for the kernel; the caller has seen that only rotary embeddings are asked for."""
    dim, wide = query.shape[3], query.shape[1] // keys.shape[1] * query.shape[2] >= BLOCK
    return (
        wide
        and dim in (64, 128)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == keys.dtype == values.dtype
        and values.shape[3] == dim
        and keys.is_contiguous() and values.is_contiguous()
    )  # fmt: skip


def _splits(query: Tensor, keys: Tensor) -> int:
    """Stretches of the context: one program a processor, two where it is long."""
    batch, heads, rows, _ = query.shape
    programs = batch * keys.shape[1] * triton.cdiv(heads // keys.shape[1] * rows, BLOCK)
    most = processors(query.device) * (1 if keys.shape[2] <= SHORT else 2)
    splits = 1
    while 2 * splits * programs <= most and splits < 16:
        splits *= 2
    return splits


def tree_attention(
    query: Tensor,  # [B, Hq, R, D], any strides with dense rows
    keys: Tensor,  # [slots, Hk, C, D]
    values: Tensor,  # [slots, Hk, C, D]
    layout: Layout,
    scaling: float,
    fresh: Fresh,  # changes state: these rows are stored in the cache
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [B, R, D]: query and fresh keys are rotated as read
) -> Tensor:  # [B, R, Hq, D]
    batch, heads, rows, dim = query.shape
    key_heads, capacity = keys.shape[1:3]
    splits = _splits(query, keys)
    tiles = triton.cdiv(heads // key_heads * rows, BLOCK)
    alone = batch * key_heads * tiles * splits <= processors(query.device)
    stages = 5 if alone else 2  # there two programs share a processor
    space = (batch * key_heads * tiles, splits, BLOCK)
    out = torch.empty((batch, rows, heads, dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((*space, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, *space), dtype=torch.float32, device=query.device)  # maximum, weight
    # halves of rows are stored apart, so the layout must not mix them
    place = gl.NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=16, rank=2)
    read = [TensorDescriptor.from_tensor(part.view(-1, dim), [KEYS, dim], place) for part in (keys, values)]
    cos, sin = rotary or (query, query)
    _attend[(batch * key_heads, splits, tiles)](
        query, *read, keys, values, fresh.key, fresh.value, cos, sin, layout.slots, layout.lengths, layout.nodes,
        layout.words, fresh.places, out, partial, sums, rounds(query.device, 2 * space[0]), *query.stride()[:3],
        *fresh.key.stride()[:3], *fresh.value.stride()[:3], *cos.stride()[:2], scaling, rows, capacity, dim, key_heads,
        heads // key_heads, layout.words.shape[2], BLOCK, KEYS, stages, splits, PATIENCE, rotary is not None,
        num_warps=4, **launch(query.device),
    )  # fmt: skip
    return out


@gluon.jit
def _angles(cos, sin, at, inside, HALF: gl.constexpr, HAS_ROTARY: gl.constexpr):
    """By which the first and the second half of rows are rotated."""
    c1, c2, s1, s2 = inside, inside, inside, inside
    if HAS_ROTARY:
        c1, c2 = gl.load(cos + at, mask=inside, other=0.0), gl.load(cos + at + HALF, mask=inside, other=0.0)
        s1, s2 = gl.load(sin + at, mask=inside, other=0.0), gl.load(sin + at + HALF, mask=inside, other=0.0)
    return c1, c2, s1, s2


@gluon.jit
def _halves(start, c1, c2, s1, s2, inside, HALF: gl.constexpr, HAS_ROTARY: gl.constexpr):
    """Rows at `start` in two halves, rotated."""
    x, y = gl.load(start, mask=inside, other=0.0), gl.load(start + HALF, mask=inside, other=0.0)
    if HAS_ROTARY:
        kind: gl.constexpr = x.dtype
        a, b = x.to(gl.float32), y.to(gl.float32)
        x = (a * c1.to(gl.float32) - b * s1.to(gl.float32)).to(kind)
        y = (b * c2.to(gl.float32) + a * s2.to(gl.float32)).to(kind)
    return x, y


@gluon.jit
def _place(to, x, y, HALF: gl.constexpr):
    to.slice(0, HALF, dim=1).store(x)
    to.slice(HALF, HALF, dim=1).store(y)


@gluon.jit
def _absorb(scores, v, largest, weight, total, kind: gl.constexpr, laid: gl.constexpr):
    """Scores (base 2) and values of some keys into the running softmax."""
    top = gl.maximum(largest, gl.max(scores, 1))
    anchor = gl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    p = gl.exp2(scores - anchor[:, None])
    fade = gl.exp2(largest - anchor)
    total = total * gl.convert_layout(fade, gl.SliceLayout(1, laid))[:, None]
    total = warpgroup_mma(gl.convert_layout(p.to(kind), gl.DotOperandLayout(0, laid, 2)), v, total)
    return top, weight * fade + gl.sum(p, 1), total


@gluon.jit
def _bit(first, second, node, WORDS: gl.constexpr):
    """[rows, keys]: whether a row sees a node in flight, by the words of its mask."""
    bits = first[:, None] >> gl.where((node >= 0) & (node < 64), node, 0)[None, :].to(gl.int64)
    if WORDS > 1:
        later = second[:, None] >> gl.where((node >= 64) & (node < 128), node - 64, 0)[None, :].to(gl.int64)
        bits = gl.where((node >= 64)[None, :], later, bits)
    return (bits & 1) != 0


@gluon.jit
def _ask(keys, values, ring, others, bar, row, there, stage, DIM: gl.constexpr, KEYS: gl.constexpr):
    """One block of keys and values on its way."""
    mbarrier.expect(bar, 4 * KEYS * DIM, pred=there)
    tma.async_copy_global_to_shared(keys, [row, 0], bar, ring.index(stage), there)
    tma.async_copy_global_to_shared(values, [row, 0], bar, others.index(stage), there)


@gluon.jit
def _shares(counters, part, SPLITS: gl.constexpr, PATIENCE: gl.constexpr):
    """Bits of the shares of the rows that this program joins: its own, when all stretches have come.

    Who has waited too long (another kernel holds the processors of those that are to come) leaves its to the last. The
    first counter rises by 16 a launch; the second holds the last launch that is complete and, below it, who has left.
    """
    each: gl.constexpr = 16 // SPLITS
    mine = 1 << part
    before = gl.atomic_add(counters, each, sem="acq_rel")
    ticket = ((before >> 4) + 1) & 0x3FFF
    if (before & 15) == 16 - each:
        taken = mine | (gl.atomic_xchg(counters + 1, ticket << 16, sem="acq_rel") & 0xFFFF)
    else:
        seen = gl.atomic_or(counters + 1, 0, sem="acquire")
        tries = 0
        while ((seen >> 16) != ticket) & (tries < PATIENCE):
            seen = gl.atomic_or(counters + 1, 0, sem="acquire")
            tries += 1
        if (seen >> 16) != ticket:
            seen = gl.atomic_or(counters + 1, mine, sem="acq_rel")
            if (seen >> 16) == ticket:  # the last came in between
                gl.atomic_and(counters + 1, ~mine, sem="acq_rel")
        taken = gl.where((seen >> 16) == ticket, mine, 0)
    return taken


@gluon.jit
def _write(
    out, value, batch, head, start, rows, DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Results of query rows from `start` on."""
    whose = start + gl.arange(0, COUNT, gl.SliceLayout(1, value.type.layout))
    d = gl.arange(0, DIM, gl.SliceLayout(0, value.type.layout))
    to = ((batch * rows + whose % rows) * HEADS * GROUP + head * GROUP + whose // rows) * DIM
    seen = (whose < GROUP * rows)[:, None] & (d < DIM)[None, :]
    gl.store(out + to[:, None] + d[None, :], value, mask=seen)


@gluon.jit
def _join(
    sums, half, partial, out, batch, head, tile, start, rows, DIM: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """A share of the rows of a tile from all stretches, always in the same order."""
    share: gl.constexpr = BLOCK // SPLITS
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [4, 1], [1, 0])
    d, cell = gl.arange(0, DIM, gl.SliceLayout(0, wide)), start + gl.arange(0, share, gl.SliceLayout(1, wide))
    top = gl.full([share], float("-inf"), gl.float32, gl.SliceLayout(1, wide))
    for p in gl.static_range(SPLITS):
        top = gl.maximum(top, gl.load(sums + p * BLOCK + cell, cache_modifier=".cg"))
    top = gl.where(top == float("-inf"), 0.0, top)
    mass = gl.zeros([share], gl.float32, gl.SliceLayout(1, wide))
    value = gl.zeros([share, DIM], gl.float32, wide)
    for p in gl.static_range(SPLITS):
        scale = gl.exp2(gl.load(sums + p * BLOCK + cell, cache_modifier=".cg") - top)
        mass += scale * gl.load(sums + half + p * BLOCK + cell, cache_modifier=".cg")
        at = partial + (p * BLOCK + cell)[:, None] * DIM + d[None, :]
        value += scale[:, None] * gl.load(at, cache_modifier=".cg")
    value = value / gl.where(mass > 0, mass, 1.0)[:, None]  # a padded row sees nothing: zeros
    _write(out, value.to(out.dtype.element_ty), batch, head, tile + start, rows, DIM, HEADS, GROUP, share)


@gluon.jit(do_not_specialize=("rows",))
def _attend(
    query, keys, values, key_rows, value_rows, new_key, new_value, cos, sin, slots, lengths, nodes, words, places, out,
    partial, sums, counters, query_batch, query_head, query_row, new_key_batch, new_key_head, new_key_row,
    new_value_batch, new_value_head, new_value_row, cos_batch, cos_row, scaling, rows, CAPACITY: gl.constexpr,
    DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, WORDS: gl.constexpr, BLOCK: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, PATIENCE: gl.constexpr, HAS_ROTARY: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = keys.dtype
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    laid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    HALF: gl.constexpr = DIM // 2
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])  # 16 bytes a thread
    batch, head = gl.program_id(0) // HEADS, gl.program_id(0) % HEADS
    part, tile = gl.program_id(1), gl.program_id(2)
    length, slot = gl.load(lengths + batch).to(gl.int32), gl.load(slots + batch).to(gl.int32)
    end = length + gl.load(nodes + batch).to(gl.int32)
    chunk = gl.maximum(gl.cdiv(gl.cdiv(end, SPLITS), KEYS), 1) * KEYS
    low = gl.minimum(part * chunk, end)
    stop = gl.minimum(low + chunk, end)
    stored = gl.minimum(end, gl.load(places + batch * rows).to(gl.int32))  # where the first fresh row is to stand
    blocks = gl.maximum(gl.minimum(gl.minimum(stop, stored), length) - low, 0) // KEYS  # of which all is seen
    base = (slot * HEADS + head) * CAPACITY
    ring = gl.allocate_shared_memory(kind, [STAGES, KEYS, DIM], keys.layout)
    others = gl.allocate_shared_memory(kind, [STAGES, KEYS, DIM], values.layout)
    asked = gl.allocate_shared_memory(kind, [BLOCK, DIM], keys.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(2):  # committed keys were written long before the launch that this one waits for
        _ask(keys, values, ring, others, bars.index(s), base + low + s * KEYS, s < blocks, s, DIM, KEYS)
    folded = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, scored))  # a key head's query heads, rows innermost
    word = words + (batch * rows + folded % rows) * WORDS
    first = gl.load(word, mask=folded < GROUP * rows, other=0)
    second = first
    if WORDS > 1:
        second = gl.load(word + 1, mask=folded < GROUP * rows, other=0)
    d, mine = gl.arange(0, HALF, gl.SliceLayout(0, flat)), tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, flat))
    row, inside = mine % rows, (mine < GROUP * rows)[:, None] & (d < HALF)[None, :]
    angle = batch * cos_batch + d[None, :]
    c1, c2, s1, s2 = _angles(cos, sin, angle + row[:, None] * cos_row, inside, HALF, HAS_ROTARY)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    start = query + batch * query_batch + (head * GROUP + mine // rows)[:, None] * query_head + row[:, None] * query_row
    q1, q2 = _halves(start + d[None, :], c1, c2, s1, s2, inside, HALF, HAS_ROTARY)
    for s in gl.static_range(2, STAGES):
        _ask(keys, values, ring, others, bars.index(s), base + low + s * KEYS, s < blocks, s, DIM, KEYS)
    _place(asked, q1, q2, HALF)
    fence_async_shared()
    largest = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, scored))
    weight = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, scored))
    total = gl.zeros([BLOCK, DIM], gl.float32, laid)
    blank = gl.zeros([BLOCK, KEYS], gl.float32, scored)
    for i in range(blocks):
        stage = i % STAGES
        mbarrier.wait(bars.index(stage), (i // STAGES) & 1)
        scores = warpgroup_mma(asked, ring.index(stage).permute((1, 0)), blank, use_acc=False) * (scaling * LOG2E)
        largest, weight, total = _absorb(scores, others.index(stage), largest, weight, total, kind, laid)
        more = i + STAGES
        _ask(keys, values, ring, others, bars.index(stage), base + low + more * KEYS, more < blocks, stage, DIM, KEYS)
    new_key += batch * new_key_batch + head * new_key_head
    new_value += batch * new_value_batch + head * new_value_head
    for at in range(low + blocks * KEYS, stop, KEYS):
        place = at + gl.arange(0, KEYS, gl.SliceLayout(1, flat))
        fresh = ((place >= stored) & (place < stop))[:, None] & (d < HALF)[None, :]
        here, nth = (base + place).to(gl.int64)[:, None] * DIM + d[None, :], (place - stored)[:, None]
        t1, t2, u1, u2 = _angles(cos, sin, angle + nth * cos_row, fresh, HALF, HAS_ROTARY)
        k1, k2 = _halves(new_key + nth * new_key_row + d[None, :], t1, t2, u1, u2, fresh, HALF, HAS_ROTARY)
        v1, v2 = _halves(new_value + nth * new_value_row + d[None, :], t1, t2, u1, u2, fresh, HALF, False)
        if tile == 0:
            gl.store(key_rows + here, k1, mask=fresh)
            gl.store(key_rows + here + HALF, k2, mask=fresh)
            gl.store(value_rows + here, v1, mask=fresh)
            gl.store(value_rows + here + HALF, v2, mask=fresh)
        if at < stored:  # the rest of what is committed
            old = ((place < stored) & (place < stop))[:, None] & (d < HALF)[None, :]
            k1 = gl.where(old, gl.load(key_rows + here, mask=old, other=0.0), k1)
            k2 = gl.where(old, gl.load(key_rows + here + HALF, mask=old, other=0.0), k2)
            v1 = gl.where(old, gl.load(value_rows + here, mask=old, other=0.0), v1)
            v2 = gl.where(old, gl.load(value_rows + here + HALF, mask=old, other=0.0), v2)
        _place(ring.index(0), k1, k2, HALF)
        _place(others.index(0), v1, v2, HALF)
        fence_async_shared()
        scores = warpgroup_mma(asked, ring.index(0).permute((1, 0)), blank, use_acc=False) * (scaling * LOG2E)
        seen = at + gl.arange(0, KEYS, gl.SliceLayout(0, scored))
        sees = (seen < length)[None, :] | ((seen < stop)[None, :] & _bit(first, second, seen - length, WORDS))
        scores = gl.where(sees, scores, float("-inf"))
        largest, weight, total = _absorb(scores, others.index(0), largest, weight, total, kind, laid)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))
    if SPLITS == 1:
        mass = gl.where(weight > 0, weight, 1.0)  # a padded row sees nothing: zeros
        whole = gl.convert_layout(mass, gl.SliceLayout(1, laid))
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
        value = gl.convert_layout((total / whole[:, None]).to(out.dtype.element_ty), wide)
        _write(out, value, batch, head, tile * BLOCK, rows, DIM, HEADS, GROUP, BLOCK)
    else:
        unit = gl.program_id(0) * gl.num_programs(2) + tile
        half = gl.num_programs(0) * gl.num_programs(2) * SPLITS * BLOCK
        cell, e = gl.arange(0, BLOCK, gl.SliceLayout(1, laid)), gl.arange(0, DIM, gl.SliceLayout(0, laid))
        sums, partial = sums + unit * SPLITS * BLOCK, partial + unit.to(gl.int64) * SPLITS * BLOCK * DIM
        gl.store(sums + part * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, scored)), largest)
        gl.store(sums + half + part * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, scored)), weight)
        gl.store(partial + (part * BLOCK + cell)[:, None] * DIM + e[None, :], total)
        gl.thread_barrier()
        taken = _shares(counters + 2 * unit, part, SPLITS, PATIENCE)
        gl.thread_barrier()
        for each in range(SPLITS):
            if (taken >> each) & 1:
                _join(
                    sums, half, partial, out, batch, head, tile * BLOCK, each * (BLOCK // SPLITS), rows, DIM, HEADS,
                    GROUP, BLOCK, SPLITS,
                )  # fmt: skip
