"""Numbers: float32 arithmetic that has the same bits in a vector and alone, for everything but the products.

Loops over these vectorise without changing a bit, because each is a fixed sequence of operations on one value. Sums
over a row are taken in an order that depends on its length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.llvm import (
    F32,
    I32,
    I64,
    Array,
    apart,
    constant,
    folded,
    fused,
    spread,
    variable,
)

Row = NDArray[np.float32]
_SHIFT = 12582912.0  # 1.5 * 2**23: adding it rounds to a whole number, which then stands in the low bits
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_PIECE = 4096  # values whose sum is taken in float32
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_SERIES = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@intrinsic  # type: ignore[untyped-decorator]
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        return builder.fma(*given)

    return types.float32(types.float32, types.float32, types.float32), build


@intrinsic  # type: ignore[untyped-decorator]
def divide(_typing: Any, a: Any, b: Any) -> Any:
    """a / b in float32; asks for no zero, which would keep a loop from becoming vectors."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        return builder.fdiv(*given)

    return types.float32(types.float32, types.float32), build


@intrinsic  # type: ignore[untyped-decorator]
def exp(_typing: Any, x: Any) -> Any:
    """e to a float32 of at most 0; what is below -87 counts as that. Two units in the last place at most."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        return _exp(builder, given[0])

    return types.float32(types.float32), build


def _exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The same of a value or of a vector."""
    low, shift, one = (constant(x.type, number) for number in (-87.0, _SHIFT, 1.0))
    x = b.select(b.fcmp_unordered(">", x, low), x, low)
    shifted = fused(b, x, constant(x.type, _LOG2E), shift)
    whole = b.fsub(shifted, shift)
    rest = fused(b, whole, constant(x.type, -_LN2_HIGH), x)
    rest = fused(b, whole, constant(x.type, -_LN2_LOW), rest)
    series = constant(x.type, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = fused(b, series, rest, constant(x.type, coefficient))
    bits = ir.VectorType(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    power = b.shl(b.bitcast(shifted, bits), constant(bits, 23))  # 2 to the whole number in the low bits
    power = b.bitcast(b.add(power, constant(bits, 0x3F800000)), x.type)
    return b.fmul(b.fadd(fused(b, series, b.fmul(rest, rest), rest), one), power)


@compiled
def copy(row: Row, out: Row) -> None:
    """As assigning would, which takes long to compile."""
    for i in range(len(row)):
        out[i] = row[i]


@compiled
def gate(gates: Row, ups: Row) -> None:
    """Changes `gates`: silu(gates) * ups."""
    for i in range(len(gates)):
        g = gates[i]
        small = exp(-abs(g))  # no overflow, whatever the sign
        share = divide(_ONE if g >= _ZERO else small, _ONE + small)
        gates[i] = g * share * ups[i]


@compiled
def squares(row: Row) -> Any:
    """The sum of squares, in eight sums that are added in the end."""
    whole = len(row) // 8 * 8
    a = b = c = d = e = f = g = h = _ZERO
    for i in range(0, whole, 8):
        a, b = fma(row[i], row[i], a), fma(row[i + 1], row[i + 1], b)
        c, d = fma(row[i + 2], row[i + 2], c), fma(row[i + 3], row[i + 3], d)
        e, f = fma(row[i + 4], row[i + 4], e), fma(row[i + 5], row[i + 5], f)
        g, h = fma(row[i + 6], row[i + 6], g), fma(row[i + 7], row[i + 7], h)
    total = ((a + e) + (c + g)) + ((b + f) + (d + h))
    for i in range(whole, len(row)):
        total = fma(row[i], row[i], total)
    return total


@compiled
def norm(row: Row, weight: Row, epsilon: float, out: Row) -> None:
    """Root-mean-square norm."""
    size = len(weight)
    factor = np.float32(1.0 / np.sqrt(np.float64(squares(row)) / size + epsilon))
    for i in range(size):
        out[i] = row[i] * factor * weight[i]


@compiled
def rotate(head: Row, cos: Row, sin: Row) -> None:
    """Changes `head`: rotated to its position; the first half pairs with the second."""
    half = len(head) // 2
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = fma(a, cos[i], -(b * sin[i]))
        head[half + i] = fma(b, cos[half + i], a * sin[half + i])


@compiled
def softmax(scores: Row) -> None:
    """Changes `scores`: weights that add up to about 1."""
    apart()
    factor = divide(_ONE, _exps(scores))
    for i in range(len(scores)):
        scores[i] *= factor


@compiled
def log_total(row: Row, top: float) -> float:
    """The logarithm of the sum of e to each; `top` is the largest. Pieces are added in float64: rows may be long."""
    apart()
    total = 0.0
    for start in range(0, len(row), _PIECE):
        total += np.float64(_total(row[start : start + _PIECE], np.float32(top)))
    return top + np.log(total)


@intrinsic  # type: ignore[untyped-decorator]
def _exps(_typing: Any, scores: Any) -> Any:
    """Changes `scores`: e to what each is below the largest. Gives their total, of eight sums added in the end."""

    def build(context: Any, b: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        row = Array(context, b, signature.args[0], given[0])
        top = _over(b, row, b.load(row.at(0)), partial(_larger, b))
        return _over(b, row, F32(0.0), b.fadd, partial(_exp_below, b, top), keep=True)

    return types.float32(scores), build


@intrinsic  # type: ignore[untyped-decorator]
def _total(_typing: Any, scores: Any, top: Any) -> Any:
    """The total of e to what each is below `top`, of eight sums added in the end."""

    def build(context: Any, b: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        row = Array(context, b, signature.args[0], given[0])
        return _over(b, row, F32(0.0), b.fadd, partial(_exp_below, b, given[1]))

    return types.float32(scores, types.float32), build


def _over(
    b: ir.IRBuilder, row: Array, start: ir.Value, add: Callable[..., ir.Value],
    change: Callable[..., ir.Value] | None = None, keep: bool = False,
) -> ir.Value:  # fmt: skip
    """All of a row on top of each other, by eights, then what is left; `keep`: what is added is written back."""
    count, eight = row.shape[0], ir.VectorType(F32, 8)
    whole = b.and_(count, I64(-8))
    for kind, low, high in ((eight, I64(0), whole), (F32, whole, count)):
        lanes = 8 if kind is eight else 1
        result = variable(b, spread(b, start, 8) if kind is eight else start)
        with cgutils.for_range_slice(b, low, high, I64(lanes)) as (i, _):
            place = b.bitcast(row.at(i), kind.as_pointer())
            value = b.load(place, align=4)
            value = value if change is None else change(value)
            if keep:
                b.store(value, place, align=4)
            b.store(add(b.load(result), value), result)
        start = folded(b, b.load(result), add) if kind is eight else b.load(result)
    return start


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _exp_below(b: ir.IRBuilder, top: ir.Value, value: ir.Value) -> ir.Value:
    return _exp(b, b.fsub(value, spread(b, top, 8) if isinstance(value.type, ir.VectorType) else top))
