"""Screen: the largest of very many products of a row, exactly, for a quarter of the bytes.

All products are taken with a copy of the weights in 8 bits. How far one of them can be from the float32 product is
known beforehand (what rounding did to its weights, times the length of the row: Cauchy and Schwarz), so most of them
cannot be the largest, and the few that can are taken again from the weights themselves, bit by bit as `multiply_float`
has them. The others stay rounded, all below the largest. Lossless for who asks for the largest alone, as in greedy
decoding; costs a second, smaller copy of the weights. Rows of which nothing can be said (not finite, or next to
nothing) are taken from the weights throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.llvm import Array, apart, folded, spread
from outrider.core.numeric.numbers import squares
from outrider.runtime.native.kernels.linear import finest, pack, share, unpack
from outrider.runtime.native.kernels.products import Linear, PreparedRows, product, product_again
from outrider.runtime.native.kernels.team import barrier
from outrider.runtime.native.kernels.vectors import ROWS

Floats = NDArray[np.float32]
WIDE = 32  # products looked at together
SOME = 4096  # rows of weights whose margins are worked out together
_UNIT = 2.0**-23  # twice what one rounding of float32 may change
_SMALLEST = np.float32(1e-30)  # a row's sum of squares below which products may have lost digits


class Screen(NamedTuple):
    linear: Linear  # the weights in 8 bits, of one layer
    margins: Floats  # [V]: how far a product may be off, in lengths of the row; [0]: there is no screen


def screen_of(weight: Floats) -> Screen:
    """Of weights [V, K]."""
    parts = [screen_rows(weight[low : low + SOME]) for low in range(0, len(weight), SOME)]
    values, scales, margins = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Screen(Linear(values[None], scales[None], np.zeros((1, 0), np.float32)), margins)


def screen_rows(weight: Floats) -> tuple[NDArray[np.int8], Floats, Floats]:
    """Of some of the rows, a multiple of ROWS unless they are the last: their values, scales and margins."""
    packed, exact = pack(weight, 8), weight.astype(np.float64)
    near = unpack(packed.values, packed.scales)[: packed.rows, : packed.columns]
    size, moved = np.linalg.norm(exact, axis=1), np.linalg.norm(exact - near, axis=1)
    columns = packed.padded
    # Whole numbers for the row are off by half a unit each (and a hundredth for the float32 that they come from), and
    # every sum in float32, the exact product's among them, by a rounding for each of its terms.
    rounding = 0.51 * np.sqrt(columns) / finest(columns) + 2 * (columns + 64) * _UNIT
    margins = (moved + rounding * (size + moved)) * (1 + (columns + 64) * _UNIT)
    return packed.values, packed.scales, np.nextafter(margins.astype(np.float32), np.float32(np.inf))


def no_screen() -> Screen:
    return screen_of(np.zeros((1, 1), dtype=np.float32))._replace(margins=np.zeros(0, dtype=np.float32))


@compiled
def screened(
    me: int, threads: int, sync: NDArray[np.int64], screen: Screen, head: Linear, near: PreparedRows, near_copy: int,
    exact: PreparedRows, exact_copy: int, x: Floats, out: Floats, floors: Floats, best: Floats,
    which: NDArray[np.int64],
) -> None:  # fmt: skip
    """out [R, V]: my share of the products of rows x [R, K], their largest exact. `near` and `exact` are x made ready.

    best and which [threads, R]: the largest of my share that may be the row's, and its place, the first of equals; -1
    where there is none. floors [threads, R] is room.
    """
    apart()
    rows = len(out)
    low, high = share(out.shape[1], me, threads)
    product(screen.linear, 0, near, near_copy, rows, out, low, high)
    for row in range(rows):
        floors[me, row] = _surely(out[row], screen.margins, _reach(x[row]), low, high)
    barrier(sync, threads)
    for row in range(rows):
        floor = floors[0, row]
        for other in range(1, threads):
            floor = max(floor, floors[other, row])
        best[me, row], which[me, row] = _largest(
            head, exact, exact_copy, out, row, screen.margins, _reach(x[row]), floor, low, high
        )


@compiled
def _reach(row: Floats) -> Any:
    """The length of a row; infinite where products may be off by anything."""
    total = squares(row)
    return np.sqrt(total) if _SMALLEST < total < np.float32(np.inf) else np.float32(np.inf)


@compiled
def _surely(products: Floats, margins: Floats, reach: float, low: int, high: int) -> Any:
    """What the largest of these cannot be below."""
    found, whole = np.float32(-np.inf), low + (high - low) // WIDE * WIDE
    for start in range(low, whole, WIDE):
        bound = _lowest(products, margins, reach, start)
        found = bound if bound > found else found
    for n in range(whole, high):
        bound = products[n] - margins[n] * reach
        found = bound if bound > found else found
    return found


@compiled
def _largest(
    head: Linear, exact: PreparedRows, copy: int, out: Floats, row: int, margins: Floats, reach: float, floor: float,
    low: int, high: int,
) -> tuple[Any, int]:  # fmt: skip
    """Changes `out`: products that may be the largest become exact. Gives the largest of them and its place."""
    products, best, which = out[row], np.float32(-np.inf), -1
    for start in range(low, high, WIDE):
        stop = min(start + WIDE, high)
        if stop - start == WIDE and not _may(products, margins, reach, floor, start):
            continue
        for first in range(start, stop, ROWS):
            last, hit = min(first + ROWS, stop), False
            for n in range(first, last):
                hit |= not products[n] + margins[n] * reach < floor  # also where that is no number
            if not hit:
                continue
            product_again(head, 0, exact, copy, row, out, first // ROWS)
            for n in range(first, last):
                value = products[n]
                # as numpy has it: what is no number is the largest
                if which < 0 or value > best or (value != value and best == best):
                    best, which = value, n
    return best, which


def _chunk(context: Any, b: ir.IRBuilder, kinds: Sequence[Any], given: Sequence[ir.Value], at: ir.Value) -> Any:
    """WIDE products, and how far off they may be."""
    products, margins = (Array(context, b, kinds[i], given[i]).vector(WIDE, at) for i in (0, 1))
    return products, b.fmul(margins, spread(b, given[2], WIDE))


@intrinsic  # type: ignore[untyped-decorator]
def _lowest(_typing: Any, products: Any, margins: Any, reach: Any, at: Any) -> Any:
    """`_surely` of WIDE products."""

    def build(context: Any, b: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        values, off = _chunk(context, b, signature.args, given, given[3])
        return folded(b, b.fsub(values, off), lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))

    return types.float32(products, margins, types.float32, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _may(_typing: Any, products: Any, margins: Any, reach: Any, floor: Any, at: Any) -> Any:
    """Whether one of WIDE products may reach the floor."""

    def build(context: Any, b: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        values, off = _chunk(context, b, signature.args, given, given[4])
        below = b.fcmp_ordered("<", b.fadd(values, off), spread(b, given[3], WIDE))
        bits = b.bitcast(below, ir.IntType(WIDE))
        return b.icmp_signed("!=", bits, ir.IntType(WIDE)(-1))

    return types.boolean(products, margins, types.float32, types.float32, types.int64), build
