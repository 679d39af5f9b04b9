"""Products of 65 to 256 rows on Hopper, in CUDA (`hopper_product.cu`): gated pairs, and products left in parts.

The vendor's library cuts the two matrices of an 8B model's gated pair into 224 tiles, two rounds of 132 processors for
1.7 rounds of work, and SiLU is another launch. Here a tile is 112 weights of each matrix by 128 rows, which makes two
even rounds, and what is written is the result. A product of many inputs it cuts into parts that another launch adds up;
here the norm that follows does so. In CUDA, as Triton's tiles are powers of two and its blocks share nothing they
fetch. Exact up to summation order; costs the weights read once and the rows once a tile. Where the source cannot be
compiled the caller goes another way.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from outrider.runtime.cuda import source as cuda_source
from outrider.runtime.cuda.launch import hopper, processors, shared_bytes
from outrider.runtime.cuda.source import Function, Unavailable

log = logging.getLogger(__name__)
MIN_ROWS, MAX_ROWS = 65, 256
ROWS, SLICE = 128, 64  # of a block; inputs looked at together
THREADS = 384

_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """A tile, and slices on their way; found by timing the matrices of an 8B model on an H200."""

    gated: bool
    weights: int  # gated: half of them of each matrix
    stages: int  # of rows
    depth: int  # of weights
    inputs: int = 0  # of a part, at least: the sums of fewer cost more than they save
    whole: bool = False  # what is written is the product, rounded

    @property
    def outputs(self) -> int:
        return self.weights // 2 if self.gated else self.weights

    @property
    def shared(self) -> int:
        """Bytes: the rings, on a line of 1024, and their barriers."""
        rings = 2 * SLICE * (ROWS * self.stages + self.weights * self.depth)
        return rings + 1024 + 16 * (self.stages + self.depth)


PAIR = ProductTiling(True, 224, 4, 5)
PARTS = {
    1: ProductTiling(False, 64, 8, 9, 2048),
    2: ProductTiling(False, 128, 6, 6, 4096),
}  # by blocks that share weights


WHOLE = (224, 208, 192, 128, 96, 64)  # weights of a tile that writes the product
AROUND = 24  # weights that would take as long as beginning and ending a tile


def gated(x: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    """[..., N]: SiLU of the first product times the second; None: this is not for the kernel."""
    if not fits(x, [first, second], PAIR):
        return None
    out = torch.empty((*x.shape[:-1], first.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(PAIR, x, first, second, out, 1)


def parts(x: Tensor, weight: Tensor) -> Tensor | None:
    """[P, ..., N] in float32: the product is their sum; None: this is not for the kernel."""
    tiling = PARTS.get(_cluster(x))
    if tiling is None or not fits(x, [weight], tiling):
        return None
    width, inputs = weight.shape
    blocks, count = -(-width // tiling.outputs) * _cluster(x), 1
    while 2 * count * blocks <= processors(x.device) and _even(inputs, 2 * count, tiling):
        count *= 2
    if count == 1:
        return None
    out = torch.empty((count, *x.shape[:-1], width), dtype=torch.float32, device=x.device)
    return _launch(tiling, x, weight, weight, out, count)


def whole_tiling(width: int, rows: int, device: torch.device) -> ProductTiling:
    """For a product that is not left in parts: the tile by which the chip is done first."""
    clusters = processors(device) // -(-rows // ROWS)
    weights = min(WHOLE, key=lambda size: ceil(ceil(width / size) / clusters) * (size + AROUND))
    slices = min(8, (shared_bytes(device) - 2048) // (2 * SLICE * (ROWS + weights)))
    return ProductTiling(False, weights, slices, slices, whole=True)


def compiles(device: torch.device) -> bool:
    """Whether the source can be compiled and loaded here; tried once."""
    with torch.cuda.device(device):
        return _function(torch.bfloat16, PARTS[1], 1, device) is not None


def fill(tiling: ProductTiling, x: Tensor, first: Tensor, second: Tensor, out: Tensor, count: int, room: int) -> bool:
    """Writes the product of at most MAX_ROWS rows [rows, K] in `count` parts, `room` rows apart, to `out`; False: it
    cannot be compiled here."""
    return _launch(tiling, x, first, second, out, count, room) is not None


def fits(x: Tensor, weights: Sequence[Tensor], tiling: ProductTiling) -> bool:
    """Whether the kernel takes this: `x` has dense rows, and the copy engine counts in 16 bytes."""
    return MIN_ROWS <= x.numel() // weights[0].shape[1] <= MAX_ROWS and takes(x, weights, tiling)


def takes(x: Tensor, weights: Sequence[Tensor], tiling: ProductTiling) -> bool:
    """The same for any number of rows."""
    width, inputs = weights[0].shape
    return (
        hopper(x.device)
        and x.dtype in _KINDS
        and inputs % SLICE == 0
        and width % 8 == 0
        and all(w.shape == weights[0].shape and w.dtype == x.dtype for w in weights)
        and all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in (x, *weights))
        and shared_bytes(x.device) >= tiling.shared
    )


def _even(inputs: int, count: int, tiling: ProductTiling) -> bool:
    """Whether so many parts are alike and none too short."""
    return inputs % (count * SLICE) == 0 and inputs // count >= tiling.inputs


def _cluster(x: Tensor) -> int:
    """Blocks that share the weights they fetch."""
    return -(-x.numel() // x.shape[-1] // ROWS)


def _launch(
    tiling: ProductTiling, x: Tensor, first: Tensor, second: Tensor, out: Tensor, count: int, room: int | None = None
) -> Tensor | None:
    (width, inputs), cluster = first.shape, _cluster(x)
    flat, tiles = x.reshape(-1, inputs), -(-width // tiling.outputs)
    rounds = -(-tiles * count // (processors(x.device) // cluster))
    with torch.cuda.device(x.device):
        kernel = _function(x.dtype, tiling, cluster, x.device)
        if kernel is None:
            return None
        maps = [cuda_source.tensor_map(flat, (ROWS, SLICE))]
        maps += [cuda_source.tensor_map(weight, (tiling.weights // 2, SLICE)) for weight in (first, second)]
        sizes = (flat.shape[0], room or flat.shape[0], width, tiles, count, inputs // SLICE // count)
        numbers = [ctypes.c_uint32(n) for n in sizes]
        arguments = [*maps, ctypes.c_void_p(out.data_ptr()), *numbers]
        cuda_source.launch(kernel, -(-tiles * count // rounds) * cluster, cluster, arguments)
    return out


@cache
def _function(dtype: torch.dtype, tiling: ProductTiling, cluster: int, device: torch.device) -> Function | None:
    try:
        return cuda_source.function(source(dtype, tiling, cluster), "product", "sm_90a", THREADS, tiling.shared)
    except Unavailable as error:
        log.warning("products of many rows are left to the vendor's library: %s", error)
        return None


def source(dtype: torch.dtype, tiling: ProductTiling, cluster: int) -> str:
    sizes = {
        "GATED": int(tiling.gated), "WHOLE": int(tiling.whole), "CLUSTER": cluster, "STAGES": tiling.stages,
        "DEPTH": tiling.depth, "WEIGHTS": tiling.weights,
    }  # fmt: skip
    defined = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    code = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return defined + _arithmetic(_KINDS[dtype], tiling.weights) + code


def _arithmetic(kind: str, weights: int) -> str:
    """What depends on the kind of number, the matrix unit's instruction among it."""
    count = weights // 2
    sums, places = (", ".join(form.format(i) for i in range(count)) for form in ("%{}", '"+f"(d[{}])'))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], unsigned long long a, unsigned long long b) {{
    asm volatile("{{.reg .pred more; setp.ne.b32 more, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n{weights}k16.f32.{kind}.{kind} "
        "{{{sums}}}, %{count}, %{count + 1}, more, 1, 1, 0, 0;}}" : {places} : "l"(a), "l"(b));
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
