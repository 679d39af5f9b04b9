"""Products whose rows have the same bits in any pass, on Hopper: one order of summation for one row and for a thousand.

The inner dimension goes by in steps of 16, the matrix unit's, through one sum; products that a norm follows are cut
into parts by the shape of the weights alone, and the norm adds them in their order. Up to 64 rows stream through
`hopper_projection`, more through `hopper_product`, 256 at a time; both have the same order. A norm or a bias is a
launch of its own. Where neither kernel takes a product, `missed` says so and the free order serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.runtime.cuda import hopper_product, projection
from outrider.runtime.cuda.hopper_product import PAIR, PARTS, ProductTiling
from outrider.runtime.cuda.joined_weights import side_by_side
from outrider.runtime.cuda.kernels import rms_norm
from outrider.runtime.cuda.launch import hopper
from outrider.runtime.cuda.reference import Norm
from outrider.runtime.cuda.source import Unavailable

AT_ONCE = 64  # rows that one launch streams


class Products:
    """The operations of `projection`, in the one order."""

    def __init__(self) -> None:
        self.missed: set[str] = set()  # products that were left to the free order

    def streams(self, x: Tensor, weights: Sequence[Tensor]) -> bool:
        if _fits(x, weights):
            return True
        self.missed.add(f"products of {weights[0].shape[1]} inputs in {str(x.dtype).removeprefix('torch.')}")
        return projection.streams(x, weights)

    def project(
        self, x: Tensor, weights: Sequence[Tensor], *, biases: Sequence[Tensor | None] = (None, None, None),
        norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        """As `projection.project`."""
        if not _fits(x, weights):
            return projection.project(x, weights, biases=biases, norm=norm, residual=residual, gated=gated)
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps)
        out = _product(x, weights, gated)
        if any(bias is not None for bias in biases):
            some = zip(biases, weights, strict=False)
            out = out + _together([w.new_zeros(len(w)) if b is None else b for b, w in some])
        return out if residual is None else residual + out

    def parts(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """As `projection.parts`; here any product is left in as many parts as its shape says."""
        if not _fits(x, [weight]):
            return projection.parts(x, weight)
        from outrider.runtime.cuda import hopper_projection

        rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
        if rows <= AT_ONCE:
            return hopper_projection.parts(x, weight)
        count = hopper_projection.part_count(weight)
        out = torch.empty((count, *x.shape[:-1], len(weight)), dtype=torch.float32, device=x.device)
        flat = out.view(count, rows, len(weight))
        for begin, some in _stretches(x.contiguous().view(-1, inputs)):
            tiling = PARTS[-(-len(some) // hopper_product.ROWS)]
            _fill(tiling, some, weight, weight, flat[0, begin:], count, rows)
        return out


def _product(x: Tensor, weights: Sequence[Tensor], gated: bool) -> Tensor:
    from outrider.runtime.cuda import hopper_projection

    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
    if rows <= AT_ONCE:
        return hopper_projection.project(x, weights, gated)
    if not gated and len(weights) > 1:
        joined = side_by_side(weights)
        if joined is None:
            return torch.cat([_product(x, [weight], False) for weight in weights], -1)
        weights = [joined]
    width, flat = len(weights[0]), x.contiguous().view(-1, inputs)
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    for begin, some in _stretches(flat):
        tiling = PAIR if gated else hopper_product.whole_tiling(width, len(some), x.device)
        _fill(tiling, some, weights[0], weights[-1], out.view(rows, width)[begin:], 1, len(some))
    return out


def _fill(tiling: ProductTiling, x: Tensor, first: Tensor, second: Tensor, out: Tensor, count: int, room: int) -> None:
    if not hopper_product.fill(tiling, x, first, second, out, count, room):
        raise Unavailable("the kernel for products of many rows does not compile for this tile")


def _stretches(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(flat), hopper_product.MAX_ROWS):
        yield begin, flat[begin : begin + hopper_product.MAX_ROWS]


def _fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    if not hopper(x.device):
        return False
    from outrider.runtime.cuda import hopper_projection

    whole = hopper_projection.takes(x, weights) and all(w.is_contiguous() and w.dtype == x.dtype for w in weights)
    return whole and all(hopper_product.takes(x.contiguous(), [w], PARTS[1]) for w in weights)


def _together(biases: Sequence[Tensor]) -> Tensor:
    joined = side_by_side(biases)
    return torch.cat(list(biases)) if joined is None else joined
