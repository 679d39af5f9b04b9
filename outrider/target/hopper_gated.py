"""Gated pairs of 65 to 256 rows on Hopper: SiLU of one product times another, in one launch of `hopper_gated.cu`.

The vendor's library cuts the two matrices of an 8B model into 224 tiles, two rounds of 132 processors for 1.7 rounds of
work, and SiLU is another launch. Here a tile is 112 weights of each matrix by 128 rows, which makes two even rounds,
and what is written is the result. In CUDA, as Triton's tiles are powers of two and its blocks share nothing they fetch.
Exact up to summation order; costs the weights read once and the rows once a tile. Where the source cannot be compiled
the caller goes another way.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from outrider.target import cuda_source
from outrider.target.cuda_source import Function, Unavailable
from outrider.target.graphed_launch import hopper, processors, shared_bytes

log = logging.getLogger(__name__)
LEAST, MOST = 65, 256  # rows
ROWS, HALF, SLICE = 128, 112, 64  # of a block; of each matrix; inputs looked at together
STAGES, DEPTH = 4, 5  # slices on their way, of rows and of weights
THREADS = 384

_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def gated(x: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    """[..., N]: SiLU of the first product times the second; None: this is not for the kernel."""
    if not fits(x, first, second):
        return None
    flat = x.reshape(-1, x.shape[-1])
    cluster = -(-flat.shape[0] // ROWS)
    with torch.cuda.device(x.device):
        own = _function(x.dtype, cluster, x.device)
        if own is None:
            return None
        out = torch.empty((*x.shape[:-1], first.shape[0]), dtype=x.dtype, device=x.device)
        _launch(own, cluster, flat, first, second, out)
    return out


def fits(x: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the kernel takes this: `x` has dense rows, and the copy engine counts in 16 bytes."""
    inputs = first.shape[1]
    return (
        hopper(x.device)
        and x.dtype in _KINDS
        and first.dtype == second.dtype == x.dtype
        and LEAST <= x.numel() // inputs <= MOST
        and inputs % SLICE == 0
        and first.shape == second.shape
        and first.shape[0] % 8 == 0
        and x.is_contiguous()
        and all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in (x, first, second))
        and shared_bytes(x.device) >= _shared()
    )


def _launch(own: Function, cluster: int, x: Tensor, first: Tensor, second: Tensor, out: Tensor) -> None:
    (rows, inputs), width = x.shape, first.shape[0]
    tiles = -(-width // HALF)
    rounds = -(-tiles // (processors(x.device) // cluster))
    maps = [cuda_source.tensor_map(x, (ROWS, SLICE))]
    maps += [cuda_source.tensor_map(weight, (HALF, SLICE)) for weight in (first, second)]
    numbers = [ctypes.c_uint32(n) for n in (rows, width, tiles, inputs // SLICE)]
    arguments = [*maps, ctypes.c_void_p(out.data_ptr()), *numbers]
    cuda_source.launch(own, -(-tiles // rounds) * cluster, cluster, arguments)


@cache
def _function(dtype: torch.dtype, cluster: int, device: torch.device) -> Function | None:
    try:
        return cuda_source.function(source(dtype, cluster), "gated", "sm_90a", THREADS, _shared())
    except Unavailable as error:
        log.warning("gated projections of many rows are left to the vendor's library: %s", error)
        return None


def _shared() -> int:
    """Bytes: the rings, on a line of 1024, and their barriers."""
    return 2 * SLICE * (ROWS * STAGES + 2 * HALF * DEPTH) + 1024 + 16 * (STAGES + DEPTH)


def source(dtype: torch.dtype, cluster: int) -> str:
    sizes = {"CLUSTER": cluster, "STAGES": STAGES, "DEPTH": DEPTH, "HALF": HALF}
    defined = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    return defined + _arithmetic(_KINDS[dtype]) + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def _arithmetic(kind: str) -> str:
    """What depends on the kind of number, the matrix unit's instruction among it."""
    sums, places = (", ".join(form.format(i) for i in range(HALF)) for form in ("%{}", '"+f"(d[{}])'))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{HALF}], unsigned long long a, unsigned long long b) {{
    asm volatile("{{.reg .pred more; setp.ne.b32 more, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n{2 * HALF}k16.f32.{kind}.{kind} "
        "{{{sums}}}, %{HALF}, %{HALF + 1}, more, 1, 1, 0, 0;}}" : {places} : "l"(a), "l"(b));
}}
__device__ __forceinline__ unsigned pair(float low, float high) {{
    unsigned d;
    asm("cvt.rn.{kind}x2.f32 %0, %2, %1;" : "=r"(d) : "f"(low), "f"(high));
    return d;
}}
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {{
    unsigned d;
    asm("mul.rn.{kind}x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}}
__device__ __forceinline__ float rounded(float x) {{
    float d;
    asm("{{.reg .b16 h; cvt.rn.{kind}.f32 h, %1; cvt.f32.{kind} %0, h;}}" : "=f"(d) : "f"(x));
    return d;
}}
"""
