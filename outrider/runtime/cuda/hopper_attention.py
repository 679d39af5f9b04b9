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
from outrider.runtime.cuda.tree_attention import SHORT, many, tiles

fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in earlier Tritons
meet = getattr(gl, "barrier", None) or gl.thread_barrier  # likewise
BLOCK, KEYS = 64, 64  # query rows of a program, keys it looks at together
PATIENCE = 64  # looks at whether the other stretches have come
LOG2E = gl.constexpr(1.4426950408889634)


def fits(query: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> bool:
    """Whether this is a case for the kernel; the caller has seen that only rotary embeddings are asked for."""
    dim, folded = query.shape[3], query.shape[1] // keys.shape[1] * query.shape[2]
    wide = folded >= BLOCK * layout.sequences  # on average
    return (
        wide
        and dim in (64, 128)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == keys.dtype == values.dtype
        and values.shape[3] == dim
        and keys.is_contiguous() and values.is_contiguous()
    )  # fmt: skip


def _programs(query: Tensor, keys: Tensor, layout: Layout) -> int:
    """That have something to do with one stretch of the context, where sequences have as many rows each."""
    key_heads, sequences = keys.shape[1], layout.sequences
    rows = triton.cdiv(layout.rows, sequences)
    return sequences * key_heads * triton.cdiv(query.shape[1] // key_heads * rows, BLOCK)


def _splits(programs: int, capacity: int, device: torch.device) -> int:
    """Stretches of the context: one program a processor, two where it is long."""
    most = processors(device) * (1 if capacity <= SHORT else 2)
    splits = 1
    while 2 * splits * programs <= most and splits < 16:
        splits *= 2
    return splits


def tree_attention(
    query: Tensor,  # [1, Hq, T, D], any strides with dense rows
    keys: Tensor,  # [slots, Hk, C, D]
    values: Tensor,  # [slots, Hk, C, D]
    layout: Layout,
    scaling: float,
    fresh: Fresh,  # changes state: these rows are stored in the cache
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [1, T, D]: query and fresh keys are rotated as read
) -> Tensor:  # [1, T, Hq, D], zeros where a row is padding
    _, heads, rows, dim = query.shape
    key_heads, capacity = keys.shape[1:3]
    sequences, group = layout.sequences, heads // key_heads
    programs, units = _programs(query, keys, layout), tiles(sequences, group * rows, BLOCK)
    splits = _splits(programs, capacity, query.device)
    alone = programs * splits <= processors(query.device)
    stages = 5 if alone else 2  # there two programs share a processor
    space = (units * key_heads, splits, BLOCK)
    out = torch.empty((1, rows, heads, dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((*space, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, *space), dtype=torch.float32, device=query.device)  # maximum, weight
    # halves of rows are stored apart, so the layout must not mix them
    place = gl.NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=16, rank=2)
    read = [TensorDescriptor.from_tensor(part.view(-1, dim), [KEYS, dim], place) for part in (keys, values)]
    cos, sin = rotary or (query, query)
    _attend[(units * key_heads, splits)](
        query, *read, keys, values, fresh.key, fresh.value, cos, sin, layout.slots, layout.lengths, layout.nodes,
        layout.begins, layout.counts, layout.causal, layout.words, out, partial, sums,
        rounds(query.device, 2 * space[0]), *query.stride()[1:3], *fresh.key.stride()[1:3],
        *fresh.value.stride()[1:3], cos.stride(1), scaling, sequences, capacity, dim, key_heads, group,
        layout.words.shape[1], many(sequences), BLOCK, KEYS, stages, splits, PATIENCE, rotary is not None,
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
    fetch(keys, [row, 0], bar, ring.index(stage), there)
    fetch(values, [row, 0], bar, others.index(stage), there)


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
    out, value, base, head, start, room, DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Results of query rows from `start` on."""
    whose = start + gl.arange(0, COUNT, gl.SliceLayout(1, value.type.layout))
    d = gl.arange(0, DIM, gl.SliceLayout(0, value.type.layout))
    to = ((base + whose // GROUP) * HEADS * GROUP + head * GROUP + whose % GROUP) * DIM
    seen = (whose < GROUP * room)[:, None] & (d < DIM)[None, :]
    gl.store(out + to[:, None] + d[None, :], value, mask=seen)


@gluon.jit
def _join(
    sums, half, partial, out, base, head, tile, start, count, room, DIM: gl.constexpr, HEADS: gl.constexpr,
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
    mass = gl.where(mass > 0, mass, 1.0)
    mass = gl.where(tile + cell < GROUP * count, mass, float("inf"))  # padding gives zeros
    value = value / mass[:, None]
    _write(out, value.to(out.dtype.element_ty), base, head, tile + start, room, DIM, HEADS, GROUP, share)


@gluon.jit
def _whose(begins, unit, sequences, GROUP: gl.constexpr, BLOCK: gl.constexpr, MANY: gl.constexpr):
    """The sequence that a tile belongs to, and which of its tiles it is: see `tiles`."""
    each = gl.arange(0, MANY, gl.BlockedLayout([MANY // 32], [32], [4], [0]))
    starts = gl.load(begins + each, mask=each < sequences, other=1 << 20).to(gl.int32) * GROUP // BLOCK + each
    sequence = gl.sum((starts <= unit).to(gl.int32), 0) - 1
    return sequence, unit - gl.max(gl.where(starts <= unit, starts, 0), 0)


@gluon.jit(do_not_specialize=("sequences",))
def _attend(
    query, keys, values, key_rows, value_rows, new_key, new_value, cos, sin, slots, lengths, nodes, begins, counts,
    causal, words, out, partial, sums, counters, query_head, query_row, new_key_head, new_key_row, new_value_head,
    new_value_row, cos_row, scaling, sequences, CAPACITY: gl.constexpr, DIM: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, WORDS: gl.constexpr, MANY: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, PATIENCE: gl.constexpr, HAS_ROTARY: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = keys.dtype
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    laid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    HALF: gl.constexpr = DIM // 2
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])  # 16 bytes a thread
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    unit, head = gl.program_id(0) // HEADS, gl.program_id(0) % HEADS
    part, batch, tile = gl.program_id(1), 0, unit
    if MANY > 1:
        batch, tile = _whose(begins, unit, sequences, GROUP, BLOCK, MANY)
    origin = gl.load(begins + batch).to(gl.int32)  # of the pass; rows are counted from here on
    room, count = gl.load(begins + batch + 1).to(gl.int32) - origin, gl.load(counts + batch).to(gl.int32)
    if tile * BLOCK >= room * GROUP:
        return
    if tile * BLOCK >= count * GROUP:  # padding alone
        if part == 0:
            if OVERLAP:
                gdc_wait()
            nothing = gl.zeros([BLOCK, DIM], out.dtype.element_ty, wide)
            _write(out, nothing, origin, head, tile * BLOCK, room, DIM, HEADS, GROUP, BLOCK)
        return
    length, slot = gl.load(lengths + batch).to(gl.int32), gl.load(slots + batch).to(gl.int32)
    stored = length + gl.load(nodes + batch).to(gl.int32) - count  # where the first row is to stand
    is_text = gl.load(causal + batch) != 0
    last = gl.minimum((tile * BLOCK + BLOCK - 1) // GROUP + 1, count)
    end = stored + gl.where(is_text, last, count)  # of a text, nothing behind the last row of the tile is seen
    chunk = gl.maximum(gl.cdiv(gl.cdiv(end, SPLITS), KEYS), 1) * KEYS
    low = gl.minimum(part * chunk, end)
    stop = gl.minimum(low + chunk, end)
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
    folded = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, scored))  # rows, a key head's query heads innermost
    bound = gl.where(is_text, stored + folded // GROUP + 1, length)  # places below it are seen as text
    word = words + (origin + folded // GROUP) * WORDS
    first = gl.load(word, mask=folded < GROUP * count, other=0)
    second = first
    if WORDS > 1:
        second = gl.load(word + 1, mask=folded < GROUP * count, other=0)
    d, mine = gl.arange(0, HALF, gl.SliceLayout(0, flat)), tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, flat))
    row, inside = origin + mine // GROUP, (mine < GROUP * count)[:, None] & (d < HALF)[None, :]
    c1, c2, s1, s2 = _angles(cos, sin, row[:, None] * cos_row + d[None, :], inside, HALF, HAS_ROTARY)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    start = query + (head * GROUP + mine % GROUP)[:, None] * query_head + row[:, None] * query_row
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
    new_key += head * new_key_head
    new_value += head * new_value_head
    stores = tile == (count * GROUP - 1) // BLOCK  # the last tile sees all of them, in a tree and in a text
    for at in range(low + blocks * KEYS, stop, KEYS):
        place = at + gl.arange(0, KEYS, gl.SliceLayout(1, flat))
        fresh = ((place >= stored) & (place < stop))[:, None] & (d < HALF)[None, :]
        here, nth = (base + place).to(gl.int64)[:, None] * DIM + d[None, :], (origin + place - stored)[:, None]
        t1, t2, u1, u2 = _angles(cos, sin, nth * cos_row + d[None, :], fresh, HALF, HAS_ROTARY)
        k1, k2 = _halves(new_key + nth * new_key_row + d[None, :], t1, t2, u1, u2, fresh, HALF, HAS_ROTARY)
        v1, v2 = _halves(new_value + nth * new_value_row + d[None, :], t1, t2, u1, u2, fresh, HALF, False)
        if stores:
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
        text = seen[None, :] < bound[:, None]
        sees = (seen < stop)[None, :] & (text | _bit(first, second, seen - length, WORDS))
        scores = gl.where(sees, scores, float("-inf"))
        largest, weight, total = _absorb(scores, others.index(0), largest, weight, total, kind, laid)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))
    if SPLITS == 1:
        mass = gl.where(weight > 0, weight, 1.0)
        mass = gl.where(folded < GROUP * count, mass, float("inf"))  # padding gives zeros
        whole = gl.convert_layout(mass, gl.SliceLayout(1, laid))
        value = gl.convert_layout((total / whole[:, None]).to(out.dtype.element_ty), wide)
        _write(out, value, origin, head, tile * BLOCK, room, DIM, HEADS, GROUP, BLOCK)
    else:
        unit = gl.program_id(0)
        half = gl.num_programs(0) * SPLITS * BLOCK
        cell, e = gl.arange(0, BLOCK, gl.SliceLayout(1, laid)), gl.arange(0, DIM, gl.SliceLayout(0, laid))
        sums, partial = sums + unit * SPLITS * BLOCK, partial + unit.to(gl.int64) * SPLITS * BLOCK * DIM
        gl.store(sums + part * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, scored)), largest)
        gl.store(sums + half + part * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, scored)), weight)
        gl.store(partial + (part * BLOCK + cell)[:, None] * DIM + e[None, :], total)
        meet()
        taken = _shares(counters + 2 * unit, part, SPLITS, PATIENCE)
        meet()
        for each in range(SPLITS):
            if (taken >> each) & 1:
                _join(
                    sums, half, partial, out, origin, head, tile * BLOCK, each * (BLOCK // SPLITS), count, room, DIM,
                    HEADS, GROUP, BLOCK, SPLITS,
                )  # fmt: skip
