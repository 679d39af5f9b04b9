"""Projections of a few rows in Triton: weights are streamed once, and what stands around a product is done with it.

One launch multiplies up to three weights that share their input (queries, keys and values) or computes a gated pair
(SiLU of one times the other), takes the RMS norm of the input as it reads it, and adds bias and residual as it writes.
No weight is copied. One row needs no matrix unit: programs read whole rows of the weight, so nothing is left to add up
afterwards. For more rows the weight is the left operand of the matrix unit and the rows the right one, so 2 to 64 rows
cost nearly the same; on Hopper the wider ones have kernels of their own (`hopper_projection.py`). Exact up to summation
order, which the number of rows alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.cuda import hopper_product
from outrider.runtime.cuda.kernels import ask_for, rms_norm
from outrider.runtime.cuda.launch import counters, hopper, launch, processors, shared_bytes
from outrider.runtime.cuda.reference import Norm

MAX_ROWS = 64
NORM_ROWS = 32  # for more, the norm is a launch of its own: every program would repeat it
SLICE = 64  # inputs must be a multiple of it
LINE = tl.constexpr(64)  # elements of one cache line
TILES, FLOATS = 8192, 8 << 20  # bounds of the workspace: tiles with a counter, partial sums


@dataclass(frozen=True, slots=True)
class ProjectionTiling:
    """How the work is cut; found by timing the matrices of an 8B model on an H200."""

    tile: int = 64  # outputs of one program
    slice: int = 64  # inputs it looks at together
    split: int = 1  # programs that share a tile, each with its part of the inputs
    stages: int = 4  # slices on their way
    warps: int = 4
    unroll: int = 0  # slices that are worked on together, where there is one row; 0: by the matrix unit


_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}


def streams(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel takes this product; others are left to the vendor's library."""
    inputs = weights[0].shape[1]
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() // inputs <= MAX_ROWS
        and inputs % SLICE == 0
        and all(w.is_contiguous() and w.shape[1] == inputs and w.dtype == x.dtype for w in weights)
        and sum(triton.cdiv(w.shape[0], 64) for w in weights) <= TILES
    )


def project(
    x: Tensor,  # [..., K], dense rows
    weights: Sequence[Tensor],  # one to three [N_i, K]
    *,
    biases: Sequence[Tensor | None] = (None, None, None),
    norm: Norm | None = None,
    residual: Tensor | None = None,  # [..., N], added after rounding the product
    gated: bool = False,  # two weights: SiLU of the first product times the second
    tiling: ProjectionTiling | None = None,
) -> Tensor:  # [..., N_0 + N_1 + ...], or [..., N_0] when gated
    inputs = weights[0].shape[1]
    wide = _wide(x, weights, biases) if residual is None and tiling is None else None
    if norm is not None and (wide is not None or x.numel() // inputs > NORM_ROWS):
        x, norm = rms_norm(x, norm.weight, norm.eps), None
    if wide is not None:
        return wide.project(x, weights, gated)
    flat = x.reshape(-1, inputs)
    rows = flat.shape[0]
    block = max(16, triton.next_power_of_2(rows)) if rows > 1 else 1
    counted = weights[:1] if gated else weights
    width = sum(w.shape[0] for w in counted)
    kind = "gated" if gated else "single" if len(weights) == 1 else "several"
    how = tiling or _tiling(width, inputs, block, kind, x.device)
    tiles = [triton.cdiv(w.shape[0], how.tile) for w in counted]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    w = [*weights, *[weights[0]] * (3 - len(weights))]
    b = [bias if bias is not None else weights[0] for bias in (*biases, None, None)[:3]]
    added = residual.reshape(-1, width) if residual is not None else out
    around = (*w, *b, norm.weight if norm else flat, added, out)
    eps = norm.eps if norm else 0.0
    facts = (inputs, *[part.shape[0] for part in w], *(*tiles, 0, 0)[:2], len(counted))
    has = (norm is not None, any(bias is not None for bias in biases), residual is not None, gated)
    if how.unroll:
        _one_row[(sum(tiles),)](
            flat, *around, eps, *facts, *has, how.tile, how.slice, how.unroll, num_warps=how.warps, **launch(x.device)
        )
        return out
    _project[(sum(tiles), how.split)](
        flat, *around, *_workspace(x.device), counters(x.device, sum(tiles)), flat.stride(0), rows, eps, *facts, width,
        *has, max(16, block), how.tile, how.slice, how.split, num_warps=how.warps, num_stages=how.stages,
        **launch(x.device),
    )  # fmt: skip
    return out


def parts(x: Tensor, weight: Tensor) -> Tensor | None:  # [P, ..., N] in float32
    """A product as parts that whoever reads it adds up, where that is the faster way."""
    if not streams(x, [weight]):
        return hopper_product.parts(x, weight)
    wide = _wide(x, [weight], ())
    return None if wide is None else wide.parts(x, weight)


def _wide(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> ModuleType | None:
    """The kernels of this chip's own that take the product, where there are any."""
    if not hopper(x.device):
        return None
    from outrider.runtime.cuda import hopper_projection

    return hopper_projection if hopper_projection.fits(x, weights, any(b is not None for b in biases)) else None


def _tiling(width: int, inputs: int, block: int, kind: str, device: torch.device) -> ProjectionTiling:
    """All programs at once on the chip, each with as many bytes on their way as fit; splits fill what is left."""
    chips, even = processors(device), inputs % 128 == 0
    tiles = triton.cdiv(width, 64)
    if block == 1:
        return _one_row_tiling(width, inputs, kind, chips)
    if kind == "gated":
        tiling = ProjectionTiling(128, 128, 1, 3, 8) if even and block <= 32 else ProjectionTiling(64, 64, 1, 3, 4)
    elif kind == "single" and block > 32 and 2 * tiles <= chips:  # one program a processor, deep in flight
        slice_ = 128 if even else 64
        tiling = ProjectionTiling(64, slice_, _split(tiles, inputs // slice_, chips), 5, 4)
    elif kind == "several" and block > 32 and tiles <= chips:
        tiling = ProjectionTiling(64, 64, _split(tiles, inputs // 64, 2 * chips), 6, 4)
    elif tiles > 3 * chips:
        tiling = ProjectionTiling(64, 128, 1, 3, 4) if even and block <= 32 else ProjectionTiling(128, 64, 1, 4, 4)
    else:
        slice_ = 128 if even and block <= 32 else 64
        split = _split(tiles, inputs // slice_, 3 * chips)
        tiling = ProjectionTiling(64, slice_, split, 4 if slice_ == 64 or tiles * split <= 2 * chips else 3, 4)
    stage = 2 * tiling.slice * (tiling.tile * (2 if kind == "gated" else 1) + block)  # bytes
    return replace(tiling, stages=max(1, min(tiling.stages, (shared_bytes(device) - 4096) // stage)))


def _one_row_tiling(width: int, inputs: int, kind: str, chips: int) -> ProjectionTiling:
    """Few outputs a program, so that all processors get about the same; as much in flight as registers hold."""
    tile, wanted = 8, 512
    if kind == "gated":
        tile = 4
    elif kind == "several" or width > 64 * chips:
        tile, wanted = 16, 256
    return ProjectionTiling(tile, next(size for size in (wanted, 256, 128, 64) if inputs % size == 0), unroll=2)


def _split(tiles: int, steps: int, programs: int) -> int:
    split = 1
    while tiles * split * 2 <= programs and steps % (2 * split) == 0 and steps // (2 * split) >= 4:
        split *= 2
    return split


def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums of split products, and of squares; one launch after another uses them."""
    if device not in _workspaces:
        _workspaces[device] = (
            torch.empty(FLOATS, dtype=torch.float32, device=device),
            torch.empty(TILES * 8 * MAX_ROWS, dtype=torch.float32, device=device),
        )
    return _workspaces[device]


@triton.jit(do_not_specialize=("rows",))
def _project(
    x, w0, w1, w2, b0, b1, b2, norm, residual, out, partial, squares, counters, x_row, rows, eps,
    INPUTS: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
    WEIGHTS: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SLICE: tl.constexpr,
    SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if WEIGHTS == 1:
        _tile(
            x, w0, w1, b0, norm, residual, out, partial, squares, counters, x_row, rows, eps, tile, tile, 0, INPUTS, N0,
            WIDTH, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, BLOCK, TILE, SLICE, SPLIT, OVERLAP,
        )  # fmt: skip
    else:
        if tile < T0:
            _tile(
                x, w0, w1, b0, norm, residual, out, partial, squares, counters, x_row, rows, eps, tile, tile, 0, INPUTS,
                N0, WIDTH, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, BLOCK, TILE, SLICE, SPLIT, OVERLAP,
            )  # fmt: skip
        elif tile < T0 + T1:
            _tile(
                x, w1, w1, b1, norm, residual, out, partial, squares, counters, x_row, rows, eps, tile, tile - T0, N0,
                INPUTS, N1, WIDTH, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, BLOCK, TILE, SLICE, SPLIT, OVERLAP,
            )  # fmt: skip
        else:
            _tile(
                x, w2, w1, b2, norm, residual, out, partial, squares, counters, x_row, rows, eps, tile, tile - T0 - T1,
                N0 + N1, INPUTS, N2, WIDTH, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, BLOCK, TILE, SLICE, SPLIT, OVERLAP,
            )  # fmt: skip


@triton.jit
def _tile(
    x, weight, second, bias, norm, residual, out, partial, squares, counters, x_row, rows, eps, tile, nth, column,
    INPUTS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SLICE: tl.constexpr,
    SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n, m, i = nth * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK), tl.arange(0, SLICE)
    steps: tl.constexpr = INPUTS // SLICE // SPLIT
    split = tl.program_id(1)
    begin = split * steps * SLICE
    there, real = (n < N)[:, None], m < rows
    at_w = n.to(tl.int64)[:, None] * INPUTS + begin + i[None, :]
    at_x = x + m[None, :] * x_row + begin + i[:, None]
    if OVERLAP:
        lines = tl.minimum(n, N - 1).to(tl.int64)[:, None] * INPUTS + begin + tl.arange(0, 4)[None, :] * LINE
        ask_for(weight + lines)
        if GATED:
            ask_for(second + lines)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    product = tl.zeros([TILE, BLOCK], tl.float32)
    gate = tl.zeros([TILE, BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        w = tl.load(weight + at_w + step * SLICE, mask=there, other=0.0)
        rows_in = tl.load(at_x + step * SLICE, mask=real[None, :], other=0.0)
        if HAS_NORM:
            wide = rows_in.to(tl.float32)
            square += tl.sum(wide * wide, 0)
            scale = tl.load(norm + begin + step * SLICE + i).to(tl.float32)
            rows_in = (wide * scale[:, None]).to(w.dtype)
        product = tl.dot(w, rows_in, product)
        if GATED:
            u = tl.load(second + at_w + step * SLICE, mask=there, other=0.0)
            gate = tl.dot(u, rows_in, gate)
    last = True
    if SPLIT > 1:  # whoever comes last adds the parts up, always in the same order
        planes: tl.constexpr = 2 if GATED else 1
        cell = tl.arange(0, TILE)[:, None] * BLOCK + m[None, :]
        base = partial + tile * SPLIT * planes * TILE * BLOCK
        mine = base + split * planes * TILE * BLOCK + cell
        tl.store(mine, product)
        if GATED:
            tl.store(mine + TILE * BLOCK, gate)
        if HAS_NORM:
            tl.store(squares + (tile * SPLIT + split) * BLOCK + m, square)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            product = tl.zeros([TILE, BLOCK], tl.float32)
            gate = tl.zeros([TILE, BLOCK], tl.float32)
            square = tl.zeros([BLOCK], tl.float32)
            for part in range(SPLIT):
                product += tl.load(base + part * planes * TILE * BLOCK + cell, cache_modifier=".cg")
                if GATED:
                    gate += tl.load(base + (part * planes + 1) * TILE * BLOCK + cell, cache_modifier=".cg")
                if HAS_NORM:
                    square += tl.load(squares + (tile * SPLIT + part) * BLOCK + m, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        kind = out.dtype.element_ty
        if HAS_NORM:
            scale = 1.0 / tl.sqrt(square / INPUTS + eps)
            product *= scale[None, :]
            gate *= scale[None, :]
        if HAS_BIAS:
            product += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        product = product.to(kind).to(tl.float32)
        if GATED:
            product = (product / (1.0 + tl.exp(-product))).to(kind).to(tl.float32)
            product = product * gate.to(kind).to(tl.float32)
        at = m[None, :] * WIDTH + column + n[:, None]
        if HAS_RESIDUAL:
            product += tl.load(residual + at, mask=there & real[None, :], other=0.0).to(tl.float32)
        tl.store(out + at, product.to(kind), mask=there & real[None, :])


@triton.jit
def _one_row(
    x, w0, w1, w2, b0, b1, b2, norm, residual, out, eps, INPUTS: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr,
    N2: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, WEIGHTS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, TILE: tl.constexpr, SLICE: tl.constexpr,
    UNROLL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if WEIGHTS == 1:
        _outputs(
            x, w0, w1, b0, norm, residual, out, eps, tile, 0, INPUTS, N0, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED, TILE,
            SLICE, UNROLL, OVERLAP,
        )  # fmt: skip
    else:
        if tile < T0:
            _outputs(
                x, w0, w1, b0, norm, residual, out, eps, tile, 0, INPUTS, N0, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, GATED,
                TILE, SLICE, UNROLL, OVERLAP,
            )  # fmt: skip
        elif tile < T0 + T1:
            _outputs(
                x, w1, w1, b1, norm, residual, out, eps, tile - T0, N0, INPUTS, N1, HAS_NORM, HAS_BIAS, HAS_RESIDUAL,
                GATED, TILE, SLICE, UNROLL, OVERLAP,
            )  # fmt: skip
        else:
            _outputs(
                x, w2, w1, b2, norm, residual, out, eps, tile - T0 - T1, N0 + N1, INPUTS, N2, HAS_NORM, HAS_BIAS,
                HAS_RESIDUAL, GATED, TILE, SLICE, UNROLL, OVERLAP,
            )  # fmt: skip


@triton.jit
def _outputs(
    x, weight, second, bias, norm, residual, out, eps, nth, column, INPUTS: tl.constexpr, N: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, UNROLL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n, i = nth * TILE + tl.arange(0, TILE), tl.arange(0, SLICE)
    there = (n < N)[:, None]
    at = n.to(tl.int64)[:, None] * INPUTS + i[None, :]
    next_w = tl.load(weight + at, mask=there, other=0.0)  # always a slice ahead, the first one before there is a row
    if GATED:
        next_u = tl.load(second + at, mask=there, other=0.0)
    if OVERLAP:
        lines = tl.minimum(n, N - 1).to(tl.int64)[:, None] * INPUTS + tl.arange(0, 4)[None, :] * LINE
        ask_for(weight + lines)
        if GATED:
            ask_for(second + lines)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    product = tl.zeros([TILE, SLICE], tl.float32)
    gate = tl.zeros([TILE, SLICE], tl.float32)
    square = tl.zeros([SLICE], tl.float32)
    for step in tl.range(0, INPUTS // SLICE, loop_unroll_factor=UNROLL):
        w, more = next_w, there & (step + 1 < INPUTS // SLICE)
        next_w = tl.load(weight + at + (step + 1) * SLICE, mask=more, other=0.0)
        if GATED:
            u = next_u
            next_u = tl.load(second + at + (step + 1) * SLICE, mask=more, other=0.0)
        row = tl.load(x + step * SLICE + i).to(tl.float32)
        if HAS_NORM:
            square += row * row
            row = (row * tl.load(norm + step * SLICE + i).to(tl.float32)).to(w.dtype).to(tl.float32)
        product += w.to(tl.float32) * row[None, :]
        if GATED:
            gate += u.to(tl.float32) * row[None, :]
    kind = out.dtype.element_ty
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(square, 0) / INPUTS + eps)
    result = tl.sum(product, 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    result = result.to(kind).to(tl.float32)
    if GATED:
        other = (tl.sum(gate, 1) * scale).to(kind).to(tl.float32)
        result = (result / (1.0 + tl.exp(-result))).to(kind).to(tl.float32) * other
    if HAS_RESIDUAL:
        result += tl.load(residual + column + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + column + n, result.to(kind), mask=n < N)
