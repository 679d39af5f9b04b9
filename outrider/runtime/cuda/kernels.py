"""The small kernels of a captured step: storing rows in the slot cache, keeping accepted paths, norm, gate, argmax.

Each is one launch for all heads (and, for accepted paths, all layers); where rows go is read on the device, so that a
captured launch serves every step. Exact up to rounding order. Needs Triton: import it where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.cuda.launch import counters, launch


@triton.jit
def ask_for(address):
    """Bring the cache lines at these addresses nearer; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


def store_rows(
    key: Tensor,  # [1, H, T, D], any strides with dense rows
    value: Tensor,  # [1, H, T, Dv]
    keys: Tensor,  # [slots, H, C, D]
    values: Tensor,  # [slots, H, C, Dv]
    slots: Tensor,  # [T]
    places: Tensor,  # [T]
    rotary: tuple[Tensor, Tensor] | None = None,  # cos, sin [1, T, D]: keys are rotated as they are stored
) -> None:
    """Changes state: row t of the pass becomes row places[t] of slot slots[t]."""
    _, heads, rows, dim = key.shape
    cos, sin = rotary or (key, key)
    _store[(rows, heads)](
        key, value, keys, values, cos, sin, slots, places, *key.stride()[1:3], *value.stride()[1:3],
        *keys.stride()[:3], *values.stride()[:3], cos.stride(1), dim, value.shape[3], triton.next_power_of_2(dim),
        triton.next_power_of_2(value.shape[3]), rotary is not None, num_warps=1,
        **launch(key.device),
    )  # fmt: skip


@triton.jit
def _store(
    key, value, keys, values, cos, sin, slots, places, key_head, key_row, value_head, value_row,
    keys_slot, keys_head, keys_row, values_slot, values_head, values_row, cos_row,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDE: tl.constexpr, WIDE_VALUE: tl.constexpr,
    HAS_ROTARY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    slot, place = tl.load(slots + row), tl.load(places + row)
    d, dv = tl.arange(0, WIDE), tl.arange(0, WIDE_VALUE)
    start = key + head * key_head + row * key_row
    k = tl.load(start + d, mask=d < DIM, other=0.0)
    if HAS_ROTARY:
        half: tl.constexpr = DIM // 2
        other = tl.load(start + tl.where(d < half, d + half, d - half), mask=d < DIM, other=0.0).to(tl.float32)
        other = tl.where(d < half, -other, other)
        angle = row * cos_row + d
        c = tl.load(cos + angle, mask=d < DIM, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=d < DIM, other=0.0).to(tl.float32)
        k = (k.to(tl.float32) * c + other * s).to(k.dtype)
    tl.store(keys + slot * keys_slot + head * keys_head + place * keys_row + d, k, mask=d < DIM)
    v = tl.load(value + head * value_head + row * value_row + dv, mask=dv < VALUE_DIM, other=0.0)
    tl.store(values + slot * values_slot + head * values_head + place * values_row + dv, v, mask=dv < VALUE_DIM)


def move_rows(block: Tensor, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Changes state: row sources[b, i] of slot slots[b] becomes row targets[b, i], in all layers; -1 moves nothing.

    `block` is [layers, slots, H, C, D]. All rows of a slot are read before any is written.
    """
    layers, _, heads, _, dim = block.shape
    batch, count = sources.shape
    _move[(layers * batch, heads)](
        block, slots, sources, targets, *block.stride()[:4], batch, count, dim, triton.next_power_of_2(dim),
        num_warps=4, **launch(block.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=("sequences",))
def _move(
    block, slots, sources, targets, layer_stride, slot_stride, head_stride, row_stride, sequences,
    COUNT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    layer, batch, head = tl.program_id(0) // sequences, tl.program_id(0) % sequences, tl.program_id(1)
    i, d = tl.arange(0, COUNT), tl.arange(0, WIDE)
    source = tl.load(sources + batch * COUNT + i)
    if tl.max(source, 0) < 0:
        return
    target = tl.load(targets + batch * COUNT + i)
    base = block + layer.to(tl.int64) * layer_stride + tl.load(slots + batch) * slot_stride + head * head_stride
    inside = (source >= 0)[:, None] & (d < DIM)[None, :]
    rows = tl.load(base + source[:, None] * row_stride + d[None, :], mask=inside, other=0.0)
    tl.debug_barrier()
    tl.store(base + target[:, None] * row_stride + d[None, :], rows, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normed(x, None, weight, eps)[1]


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A sum, and its norm; `y` may come in parts [P, ..., K]."""
    return _normed(x, y, weight, eps)


def _normed(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    parts = 0 if y is None else y.shape[0] if y.dim() > x.dim() else 1
    other = flat if y is None else y.reshape(-1, width)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    whole = flat if y is None else torch.empty_like(out)
    wide = triton.next_power_of_2(width)
    _norm[(flat.shape[0],)](
        flat, other, weight, whole, out, flat.stride(0), other.stride(0), flat.shape[0], eps, width, wide, parts,
        num_warps=min(16, max(1, wide // 256)), **launch(x.device),
    )  # fmt: skip
    return whole.view(x.shape), out.view(x.shape)


@triton.jit(do_not_specialize=("rows",))
def _norm(
    x, y, weight, whole, out, x_row, y_row, rows, eps,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0), tl.arange(0, WIDE)
    by = tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # at once: a norm is so short that the next launch would come too late
        tl.extra.cuda.gdc_wait()
    kind = out.dtype.element_ty
    value = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros([WIDE], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(y + (part * rows + row) * y_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        value = (value + added.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        tl.store(whole + row * WIDTH + i, value.to(kind), mask=i < WIDTH)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normed = (value * scale).to(kind).to(tl.float32) * by
    tl.store(out + row * WIDTH + i, normed.to(kind), mask=i < WIDTH)


STRETCH = 8192  # logits that one program looks through


def likeliest(logits: Tensor) -> Tensor:
    """The first of the largest of every row."""
    size = logits.shape[-1]
    flat = logits.reshape(-1, size)
    rows, parts = flat.shape[0], triton.cdiv(size, STRETCH)
    out = torch.empty(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    tops = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _likeliest[(rows, parts)](
        flat, tops, where, out, counters(logits.device, rows), flat.stride(0), size, STRETCH, parts,
        triton.next_power_of_2(parts), num_warps=8, **launch(logits.device),
    )  # fmt: skip
    return out


@triton.jit
def _likeliest(
    logits, tops, where, out, counters, row_stride, SIZE: tl.constexpr, STRETCH: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * STRETCH + tl.arange(0, STRETCH)
    value = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=i < SIZE, other=float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    tl.store(tops + row * PARTS + part, top)
    tl.store(where + row * PARTS + part, tl.min(tl.where(value == top, i, SIZE - 1), 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == PARTS - 1:
        p = tl.arange(0, WIDE)
        best = tl.load(tops + row * PARTS + p, mask=p < PARTS, other=float("-inf"), cache_modifier=".cg")
        at = tl.load(where + row * PARTS + p, mask=p < PARTS, other=SIZE - 1, cache_modifier=".cg")
        tl.store(out + row, tl.min(tl.where(best == tl.max(best, 0), at, SIZE - 1), 0))
        tl.store(counters + row, 0)


def gate(first: Tensor, second: Tensor) -> Tensor:
    """SiLU of one times the other."""
    first, second = first.contiguous(), second.contiguous()
    out = torch.empty_like(first)
    _gate[(triton.cdiv(first.numel(), 1024),)](first, second, out, first.numel(), 1024, **launch(first.device))
    return out


@triton.jit
def _gate(first, second, out, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(first + i, mask=i < count, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    a = (a / (1.0 + tl.exp(-a))).to(kind).to(tl.float32)
    b = tl.load(second + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out + i, (a * b).to(kind), mask=i < count)
