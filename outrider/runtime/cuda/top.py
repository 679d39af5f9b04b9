"""The likeliest tokens of every row in Triton: two launches that read the scores once and leave a few numbers a row.

Each program of the first sorts out one stretch of a row (its largest few, and its part of the normalising sum); the
second joins the stretches. A score and its id make one integer, so that equals come out by the lower id. Exact up to
rounding of the sum. Needs Triton: import it where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.cuda.launch import launch

STRETCH = 2048  # scores a program looks at


def top(
    logits: Tensor,  # [..., V], dense rows
    count: int,
    temperature: Tensor | None = None,  # [rows] temperatures, float32; None: 1
) -> Tensor:  # [2, ..., count] int32: ids, likeliest first, and the bits of their float32 log-probabilities
    width = logits.shape[-1]
    flat = logits.reshape(-1, width)
    rows, stretches = flat.shape[0], triton.cdiv(width, STRETCH)
    out = torch.empty((2, *logits.shape[:-1], count), dtype=torch.int32, device=logits.device)
    keys = torch.empty((rows, stretches, count), dtype=torch.int64, device=logits.device)
    sums = torch.empty((2, rows, stretches), dtype=torch.float32, device=logits.device)  # maximum, weight
    each = temperature.contiguous() if temperature is not None else sums
    _stretch[(rows, stretches)](
        flat, each, keys, sums, flat.stride(0), width, rows * stretches, count, STRETCH, temperature is not None,
        num_warps=8, **launch(logits.device),
    )  # fmt: skip
    _join[(rows,)](
        keys, sums, out, stretches, rows * stretches, rows * count, count, triton.next_power_of_2(stretches),
        triton.next_power_of_2(stretches * count), num_warps=4, **launch(logits.device),
    )  # fmt: skip
    return out


@triton.jit
def _stretch(
    logits, temperature, keys, sums, row_stride, width, half,
    COUNT: tl.constexpr, STRETCH: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * STRETCH + tl.arange(0, STRETCH)
    x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=i < width, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        x = x / tl.load(temperature + row)
    x = x + 0.0  # -0.0 becomes 0.0
    largest = tl.max(x, 0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    at = row * tl.num_programs(1) + part
    tl.store(sums + at, largest)
    tl.store(sums + half + at, tl.sum(tl.exp(x - anchor), 0))
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # as integers they compare as the floats do
    key = (ordered << 32) | (0x7FFFFFFF - i).to(tl.int64)
    for rank in range(COUNT):
        best = tl.max(key, 0)
        tl.store(keys + at * COUNT + rank, best)
        key = tl.where(key == best, -0x8000000000000000, key)


@triton.jit
def _join(
    keys, sums, out, stretches, half, plane,
    COUNT: tl.constexpr, WIDE: tl.constexpr, WIDE_KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    part, i = tl.arange(0, WIDE), tl.arange(0, WIDE_KEYS)
    at = row * stretches + part
    largest = tl.load(sums + at, mask=part < stretches, other=float("-inf"))
    weight = tl.load(sums + half + at, mask=part < stretches, other=0.0)
    top = tl.max(largest, 0)
    total = top + tl.log(tl.sum(tl.where(weight > 0, weight * tl.exp(largest - top), 0.0), 0))
    key = tl.load(keys + row * stretches * COUNT + i, mask=i < stretches * COUNT, other=-0x8000000000000000)
    for rank in range(COUNT):
        best = tl.max(key, 0)
        key = tl.where(key == best, -0x8000000000000000, key)
        high = (best >> 32).to(tl.int32)
        value = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        there = value > float("-inf")
        token = tl.where(there, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), -1)
        logprob = tl.where(there, value - total, float("-inf"))
        tl.store(out + row * COUNT + rank, token)
        tl.store(out + plane + row * COUNT + rank, logprob.to(tl.int32, bitcast=True))
