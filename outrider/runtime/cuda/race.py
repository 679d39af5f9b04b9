"""The target's race over rows of scores in Triton: one launch reads each score once and writes a few numbers a row.

What `core.noise.race_scores` says, by the same 64-bit integers: of each token the logarithm of its time, in float64 and
with no distribution made. Each program finds the first of one stretch of a row. Another token only where two times
agree to the last bits. Needs Triton: import it where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 1024  # scores a program looks at


def pick(
    scores: Tensor,  # [rows, V], each row dense
    temperatures: Tensor,  # [rows] float64; a row of temperature 0 is passed over, and gives any token
    keys: Tensor,  # [rows] int64
) -> Tensor:  # [rows] int64
    rows, width = scores.shape
    stretches = triton.cdiv(width, STRETCH)
    times = torch.empty((rows, stretches), dtype=torch.float64, device=scores.device)
    tokens = torch.empty((rows, stretches), dtype=torch.int64, device=scores.device)
    _first[(rows, stretches)](
        scores, temperatures.contiguous(), keys.contiguous(), times, tokens, scores.stride(0), width, STRETCH,
        num_warps=4,
    )  # fmt: skip
    return tokens.gather(1, times.argmin(1, keepdim=True))[:, 0]


@triton.jit
def _first(scores, temperatures, keys, times, tokens, row_stride, width, STRETCH: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature <= 0.0:
        tl.store(tokens + row * tl.num_programs(1) + part, 0)
        return
    i = part * STRETCH + tl.arange(0, STRETCH)
    score = tl.load(scores + row.to(tl.int64) * row_stride + i, mask=i < width, other=float("-inf"))
    x = tl.load(keys + row).to(tl.uint64) + (i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    u = ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    wait = tl.log(-tl.log(1.0 - u))  # 1 - u is exact: u has 52 bits and a half
    time = wait - score.to(tl.float64) / temperature
    time = tl.where(score > float("-inf"), time, float("inf"))
    least = tl.min(time, 0)
    at = row * tl.num_programs(1) + part
    tl.store(times + at, least)
    tl.store(tokens + at, tl.min(tl.where(time == least, i, width), 0).to(tl.int64))
