"""Projections of 2 to 64 rows on Hopper, in Gluon: slices of weights and rows stream through shared memory in a ring.

Every program multiplies one tile of outputs, or a few in turn; the copy engine fills the ring ahead of the matrix unit,
the first slices of the weights before the launch waits for the rows. Where there are fewer tiles than processors the
inputs are cut into parts whose sums are left for the norm that follows. Exact up to summation order; costs the weights
read once and the rows once a tile. Needs Triton with Gluon: import it where `launch.hopper` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.runtime.cuda.launch import launch, processors, shared_bytes

fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name in earlier Tritons
MIN_ROWS, MAX_ROWS = 2, 64  # one needs no matrix unit, more are left to the vendor's library
TILE, SLICE = 64, 128  # outputs of a program, inputs it looks at together: half as many where they are odd
READY = 3  # slices of the weights asked for before the rows are there: more would be in the rows' way
DEEPEST = 8  # slices on their way


def fits(x: Tensor, weights: Sequence[Tensor], biased: bool) -> bool:
    """Whether this product is one for `project` or `parts`; the caller has seen that the weights are alike."""
    inputs = weights[0].shape[1]
    some = MIN_ROWS <= x.numel() // inputs <= MAX_ROWS
    return not biased and some and inputs % SLICE == 0 and takes(x, weights)


def takes(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the copy engine reads them, for up to MAX_ROWS rows, one of them as well."""
    return (
        weights[0].shape[1] % (SLICE // 2) == 0
        and x.stride(-1) == 1
        and x.stride(-2) % 8 == 0  # the copy engine counts in 16 bytes
        and all(part.data_ptr() % 16 == 0 for part in (x, *weights))
        and all(w.shape[0] % 8 == 0 for w in weights)
    )


def project(x: Tensor, weights: Sequence[Tensor], gated: bool = False) -> Tensor:
    """[..., N_0 + N_1 + ...], or SiLU of the first product times the second."""
    width = weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _launch(x, weights, out, 1, gated)
    return out


def part_count(weight: Tensor) -> int:
    """Parts of the inputs that are summed apart: as many as give the chip's processors a tile each."""
    tiles, steps = triton.cdiv(weight.shape[0], TILE), weight.shape[1] // _slice(weight.shape[1])
    count = 1
    while 2 * count * tiles <= processors(weight.device) and steps % (2 * count) == 0 and steps // (2 * count) >= 4:
        count *= 2
    return count


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """[P, ..., N] in float32: the product is their sum."""
    count = part_count(weight)
    out = torch.empty((count, *x.shape[:-1], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, [weight], out, count, False)
    return out


def _slice(inputs: int) -> int:
    return SLICE if inputs % SLICE == 0 else SLICE // 2


def _launch(x: Tensor, weights: Sequence[Tensor], out: Tensor, count: int, gated: bool) -> None:
    inputs = weights[0].shape[1]
    flat, slice_ = x.reshape(-1, inputs), _slice(inputs)
    rows, block = flat.shape[0], max(16, triton.next_power_of_2(flat.shape[0]))
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    counted = weights[:1] if gated else weights
    tiles = [triton.cdiv(w.shape[0], TILE) for w in counted]
    runs = sum(tiles) * count
    stage = 2 * slice_ * (TILE * (2 if gated else 1) + block)  # bytes
    stages = min(DEEPEST, (shared_bytes(x.device) - TILE * block * out.element_size() - 2048) // stage)
    places = [gl.NVMMASharedLayout.get_default_for([size, slice_], kind) for size in (block, TILE)]
    read = TensorDescriptor(flat, [rows, inputs], [flat.stride(0), 1], [block, slice_], places[0])
    streamed = [TensorDescriptor(w, list(w.shape), [inputs, 1], [TILE, slice_], places[1]) for w in weights]
    sizes, starts = [w.shape[0] for w in counted], (*tiles, 0, 0)[:2]
    _stream[(min(runs, processors(x.device)),)](
        read, *streamed, *[streamed[0]] * (3 - len(streamed)), out, rows, *(*sizes, 0, 0)[:3], *starts, len(counted),
        out.shape[-1], runs, inputs // slice_ // count, count, gated, block, TILE, slice_, stages, min(READY, stages),
        num_warps=4, **launch(x.device),
    )  # fmt: skip


@gluon.jit
def _column(step, run, RUN: gl.constexpr, PARTS: gl.constexpr, SLICE: gl.constexpr):
    return (run % PARTS * RUN + step % RUN) * SLICE


@gluon.jit
def _ask(
    w0, w1, w2, ring, bar, begin, step, there, stage, T0: gl.constexpr, T1: gl.constexpr, WEIGHTS: gl.constexpr,
    RUN: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, TILE: gl.constexpr, SLICE: gl.constexpr,
):  # fmt: skip
    """One slice of the weights on its way."""
    run = begin + step // RUN
    row, at = run // PARTS * TILE, _column(step, run, RUN, PARTS, SLICE)
    if GATED:
        fetch(w0, [row, at], bar, ring.index(2 * stage), there)
        fetch(w1, [row, at], bar, ring.index(2 * stage + 1), there)
    elif WEIGHTS == 1:
        fetch(w0, [row, at], bar, ring.index(stage), there)
    else:
        second, third = row >= T0 * TILE, row >= (T0 + T1) * TILE
        fetch(w0, [row, at], bar, ring.index(stage), there & (not second))
        fetch(w1, [row - T0 * TILE, at], bar, ring.index(stage), there & second & (not third))
        fetch(w2, [row - (T0 + T1) * TILE, at], bar, ring.index(stage), there & third)


@gluon.jit(do_not_specialize=("rows",))
def _stream(
    x, w0, w1, w2, out, rows, N0: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, T0: gl.constexpr,
    T1: gl.constexpr, WEIGHTS: gl.constexpr, WIDTH: gl.constexpr, RUNS: gl.constexpr, RUN: gl.constexpr,
    PARTS: gl.constexpr, GATED: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr, SLICE: gl.constexpr,
    STAGES: gl.constexpr, READY: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """A run is one tile's part of the inputs; a program's runs follow each other without a pause of the ring."""
    kind: gl.constexpr = w0.dtype
    planes: gl.constexpr = 2 if GATED else 1
    size: gl.constexpr = (planes * TILE + BLOCK) * SLICE * 2  # bytes of a slice of weights and rows
    laid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    me, programs = gl.program_id(0), gl.num_programs(0)
    begin = me * RUNS // programs
    count = ((me + 1) * RUNS // programs - begin) * RUN
    ring = gl.allocate_shared_memory(kind, [STAGES * planes, TILE, SLICE], w0.layout)
    given = gl.allocate_shared_memory(kind, [STAGES, BLOCK, SLICE], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), size, pred=s < count)
    for s in gl.static_range(READY):
        _ask(w0, w1, w2, ring, bars.index(s), begin, s, s < count, s, T0, T1, WEIGHTS, RUN, PARTS, GATED, TILE, SLICE)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        at = _column(s, begin + s // RUN, RUN, PARTS, SLICE)
        fetch(x, [0, at], bars.index(s), given.index(s), s < count)
    for s in gl.static_range(READY, STAGES):
        _ask(w0, w1, w2, ring, bars.index(s), begin, s, s < count, s, T0, T1, WEIGHTS, RUN, PARTS, GATED, TILE, SLICE)
    product = gl.zeros([TILE, BLOCK], gl.float32, laid)
    gate = gl.zeros([TILE, BLOCK], gl.float32, laid)
    for step in range(count):
        stage = step % STAGES
        mbarrier.wait(bars.index(stage), (step // STAGES) & 1)
        going, rows_in = step % RUN != 0, given.index(stage).permute((1, 0))
        if GATED:
            product = warpgroup_mma(ring.index(2 * stage), rows_in, product, use_acc=going, is_async=True)
            gate = warpgroup_mma(ring.index(2 * stage + 1), rows_in, gate, use_acc=going, is_async=True)
            product, gate = warpgroup_mma_wait(2, deps=[product, gate])
        else:
            product = warpgroup_mma(ring.index(stage), rows_in, product, use_acc=going, is_async=True)
            product = warpgroup_mma_wait(1, deps=[product])
        more = step - 1 + STAGES  # the slice before is done with: its place takes this one
        there, free = (step > 0) & (more < count), more % STAGES
        mbarrier.expect(bars.index(free), size, pred=there)
        at = _column(more, begin + more // RUN, RUN, PARTS, SLICE)
        fetch(x, [0, at], bars.index(free), given.index(free), there)
        _ask(
            w0, w1, w2, ring, bars.index(free), begin, more, there, free, T0, T1, WEIGHTS, RUN, PARTS, GATED, TILE,
            SLICE,
        )  # fmt: skip
        if step % RUN == RUN - 1:
            product, gate = warpgroup_mma_wait(0, deps=[product, gate])
            run = begin + step // RUN
            tile, column, end = run // PARTS, 0, N0
            if WEIGHTS > 1:
                if tile >= T0 + T1:
                    tile, column, end = tile - T0 - T1, N0 + N1, N2
                elif tile >= T0:
                    tile, column, end = tile - T0, N0, N1
            _store(product, gate, out + run % PARTS * rows * WIDTH + column, tile, end, rows, WIDTH, GATED, BLOCK, TILE)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


@gluon.jit
def _store(
    product, gate, out, tile, end, rows, WIDTH: gl.constexpr, GATED: gl.constexpr, BLOCK: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = out.dtype.element_ty
    whole: gl.constexpr = kind != gl.float32  # parts have 32 bytes of one row side by side as they are
    flat: gl.constexpr = (
        gl.BlockedLayout([8, 1], [TILE // 8, 256 // TILE], [1, 4], [0, 1]) if whole else product.type.layout
    )
    value = product.to(kind)
    if GATED:
        wide = value.to(gl.float32)
        wide = (wide / (1.0 + gl.exp(-wide))).to(kind).to(gl.float32)
        value = (wide * gate.to(kind).to(gl.float32)).to(kind)
    value = gl.convert_layout(value, flat)
    n = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, flat))
    m = gl.arange(0, BLOCK, gl.SliceLayout(0, flat))
    gl.store(out + m[None, :] * WIDTH + n[:, None], value, mask=(n < end)[:, None] & (m < rows)[None, :])
