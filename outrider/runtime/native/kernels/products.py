"""Products: one name for the products of every precision; which one is meant shows in the type of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.numbers import copy
from outrider.runtime.native.kernels.linear import (
    Packed,
    group_sums,
    multiply,
    multiply_float,
    multiply_float_block,
    multiply_int4,
    quantize,
)
from outrider.runtime.native.kernels.vectors import FLOATS, GROUP, ROWS

Floats = NDArray[np.float32]


class Linear(NamedTuple):
    """The same product of all layers."""

    values: NDArray[Any]  # [L, ...] as `linear.pack` makes them
    scales: NDArray[Any]  # [L, ...] likewise
    bias: Floats  # [L, N]; [L, 0]: none


def single(packed: Packed) -> Linear:
    """Of one layer, without bias."""
    return Linear(packed.values[None], packed.scales[None], np.zeros((1, 0), np.float32))


class PreparedRows(NamedTuple):
    """Rows as products read them, a copy a thread."""

    q: NDArray[Any]  # [threads, R, padded]: whole numbers, or float32
    scales: Floats  # [threads, R]
    sums: Floats  # [threads, R, groups]; [threads, R, 0]: not needed


@compiled
def prepare(x: Floats, rows: PreparedRows, copy: int, low: int, high: int) -> None:
    """Rows [low, high) of x [R, K] made ready in one of the copies."""
    _round(x, rows.q[copy], rows.scales[copy], low, high)
    if rows.sums.shape[2]:
        group_sums(rows.q[copy], rows.sums[copy], low, high)


@compiled
def product(
    linear: Linear, layer: int, rows: PreparedRows, copy: int, count: int, out: Floats, low: int, high: int
) -> None:  # fmt: skip
    """out[:count, low:high] = that share of a product, with its bias."""
    _multiply(linear.values[layer], linear.scales[layer], rows.q[copy, :count], rows.scales[copy], rows.sums[copy],
              out, low, high)  # fmt: skip
    if linear.bias.shape[1]:
        bias = linear.bias[layer]
        for row in range(count):
            for n in range(low, high):
                out[row, n] += bias[n]


@compiled
def product_again(
    linear: Linear, layer: int, rows: PreparedRows, copy: int, row: int, out: Floats, block: int
) -> None:  # fmt: skip
    """One row's `product` with one block of float32 weights, without bias; nothing is done with other weights."""
    _multiply_again(linear.values[layer], rows.q[copy], out, block, row)


@compiled
def look_up(linear: Linear, row: int, out: Floats) -> None:
    """out [K] = a row of weights of one layer, as `linear.unpack` has it."""
    _unpack(linear.values[0], linear.scales[0], row, out)


def _unpack(values: NDArray[Any], scales: NDArray[Any], row: int, out: Floats) -> None:
    """Compiled code only."""


def _round(x: Floats, q: NDArray[Any], scales: Floats, low: int, high: int) -> None:
    """Compiled code only."""


def _multiply(
    values: NDArray[Any], scales: NDArray[Any], q: NDArray[Any], qscales: Floats, sums: Floats, out: Floats, low: int,
    high: int,
) -> None:  # fmt: skip
    """Compiled code only."""


def _multiply_again(values: NDArray[Any], q: NDArray[Any], out: Floats, block: int, row: int) -> None:
    """Compiled code only."""


@overload(_unpack)  # type: ignore[untyped-decorator]
def _unpacks(values: Any, scales: Any, row: Any, out: Any) -> Callable[..., None]:
    def floats(values: Any, scales: Any, row: Any, out: Any) -> None:
        block, first = values[row // ROWS], row % ROWS * FLOATS
        for k in range(len(out)):
            out[k] = block[k // FLOATS, first + k % FLOATS]

    def eight(values: Any, scales: Any, row: Any, out: Any) -> None:
        block, first, scale = values[row // ROWS], row % ROWS * GROUP, scales[row]
        for k in range(len(out)):
            out[k] = np.float32(block[k // GROUP, first + k % GROUP]) * scale

    return {types.float32: floats, types.int8: eight}[values.dtype]


@overload(_round)  # type: ignore[untyped-decorator]
def _rounds(x: Any, q: Any, scales: Any, low: Any, high: Any) -> Callable[..., None]:
    def copied(x: Any, q: Any, scales: Any, low: Any, high: Any) -> None:
        for row in range(low, high):
            copy(x[row], q[row])

    def rounded(x: Any, q: Any, scales: Any, low: Any, high: Any) -> None:
        quantize(x, q, scales, low, high)

    return copied if q.dtype == types.float32 else rounded


@overload(_multiply)  # type: ignore[untyped-decorator]
def _multiplies(
    values: Any, scales: Any, q: Any, qscales: Any, sums: Any, out: Any, low: Any, high: Any
) -> Callable[..., None]:  # fmt: skip
    def floats(values: Any, scales: Any, q: Any, qscales: Any, sums: Any, out: Any, low: Any, high: Any) -> None:
        multiply_float(values, q, out, low, high)

    def eight(values: Any, scales: Any, q: Any, qscales: Any, sums: Any, out: Any, low: Any, high: Any) -> None:
        multiply(values, scales, q, qscales, out, low, high)

    def four(values: Any, scales: Any, q: Any, qscales: Any, sums: Any, out: Any, low: Any, high: Any) -> None:
        multiply_int4(values, scales, q, sums, qscales, out, low, high)

    return {types.float32: floats, types.int8: eight, types.uint8: four}[values.dtype]


@overload(_multiply_again)  # type: ignore[untyped-decorator]
def _multiplies_again(values: Any, q: Any, out: Any, block: Any, row: Any) -> Callable[..., None]:
    def again(values: Any, q: Any, out: Any, block: Any, row: Any) -> None:
        multiply_float_block(values, q, out, block, row)

    def nothing(values: Any, q: Any, out: Any, block: Any, row: Any) -> None:
        pass

    return again if values.dtype == types.float32 else nothing
