"""Numbers: float32 arithmetic that has the same bits in a vector and alone, for everything but the products.

Loops over these vectorise without changing a bit, because each is a fixed sequence of operations on one value. Sums
over a row are taken in an order that depends on its length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from outrider.compiled import compiled

Row = NDArray[np.float32]
_SHIFT = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, which then stands in the low bits
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOW, _ONE, _ZERO = np.float32(-87.0), np.float32(1.0), np.float32(0.0)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)  # by power
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


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
def _power(_typing: Any, shifted: Any) -> Any:
    """2 to the whole number in the low bits of a float32."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        whole = ir.IntType(32)
        bits = builder.shl(builder.bitcast(given[0], whole), whole(23))
        return builder.bitcast(builder.add(bits, whole(0x3F800000)), ir.FloatType())

    return types.float32(types.float32), build


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e to a float32 of at most 0; what is below -87 counts as that. Two units in the last place at most."""
    x = max(x, _LOW)
    shifted = fma(x, _LOG2E, _SHIFT)
    whole = shifted - _SHIFT
    rest = fma(-whole, _LN2_LOW, fma(-whole, _LN2_HIGH, x))
    series = fma(fma(fma(fma(fma(_P5, rest, _P4), rest, _P3), rest, _P2), rest, _P1), rest, _P0)
    return (fma(series, rest * rest, rest) + _ONE) * _power(shifted)


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
    """Changes `head`: turned to its position; the first half pairs with the second."""
    half = len(head) // 2
    for i in range(half):
        a, b = head[i], head[half + i]
        head[i] = fma(a, cos[i], -(b * sin[i]))
        head[half + i] = fma(b, cos[half + i], a * sin[half + i])


@compiled
def softmax(scores: Row) -> None:
    """Changes `scores`: weights that add up to about 1."""
    top = _largest(scores)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - top)
    factor = divide(_ONE, _total(scores))
    for i in range(len(scores)):
        scores[i] *= factor


@compiled
def _largest(row: Row) -> Any:
    whole = len(row) // 8 * 8
    a = b = c = d = e = f = g = h = row[0]
    for i in range(0, whole, 8):
        a, b, c, d = max(a, row[i]), max(b, row[i + 1]), max(c, row[i + 2]), max(d, row[i + 3])
        e, f, g, h = max(e, row[i + 4]), max(f, row[i + 5]), max(g, row[i + 6]), max(h, row[i + 7])
    top = max(max(max(a, e), max(c, g)), max(max(b, f), max(d, h)))
    for i in range(whole, len(row)):
        top = max(top, row[i])
    return top


@compiled
def _total(row: Row) -> Any:
    """In eight sums that are added in the end."""
    whole = len(row) // 8 * 8
    a = b = c = d = e = f = g = h = _ZERO
    for i in range(0, whole, 8):
        a, b, c, d = a + row[i], b + row[i + 1], c + row[i + 2], d + row[i + 3]
        e, f, g, h = e + row[i + 4], f + row[i + 5], g + row[i + 6], h + row[i + 7]
    total = ((a + e) + (c + g)) + ((b + f) + (d + h))
    for i in range(whole, len(row)):
        total += row[i]
    return total
