"""Linear: products of a few rows of activations with weights of 8, 4 or 32 bits, at the speed of memory.

Activations of 8 and 4 bit weights are rounded to whole numbers of up to 16 bits, one scale a row, as many bits as sums
in 32 bits allow. Sums of whole numbers do not depend on their order, and those of float32 have one order, so that a row
has the same result to the last bit whatever rows stand beside it. Compiled code calls `quantize`, then a `multiply...`
of its share of the output (`share`); nothing here allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.llvm import apart
from outrider.runtime.native.kernels.vectors import FLOATS, GROUP, HALVES, ROWS, float_tile, int4_tile, int8_tile

PANEL = 1 << 16  # bytes of weights that all rows go through while they are near: few rows stay nearer still meanwhile
PIECE = 256  # groups whose products are added in 32 bits: pieces of longer rows are added in float32
_LARGEST = (1 << 31) - 1

Whole = NDArray[np.int16]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [rows, columns] as tiles read it: blocks of ROWS rows, padded, with the columns of all rows in turn."""

    rows: int
    columns: int
    bits: int  # 8, 4 or 32
    values: NDArray[Any]  # [blocks, groups, what one group of ROWS rows takes]
    scales: NDArray[Any]  # 8 bits: [rows, padded]; 4: [blocks, groups, scales then minimums]; 32: none

    @property
    def padded(self) -> int:
        """Columns that activations need; those behind `columns` count nothing and must be finite."""
        return self.values.shape[1] * (FLOATS if self.bits == 32 else GROUP)


def pack(weight: Floats, bits: int = 8) -> Packed:
    """Of float32 [rows, columns]: 8 bits with a scale a row, 4 with scale and minimum by groups, or 32 as they are."""
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    if bits == 32:
        return Packed(len(weight), weight.shape[1], 32, _blocks(weight, FLOATS), np.empty(0, np.float32))
    if bits == 8:
        scales = np.abs(weight).max(1, initial=0) / np.float32(127)
        whole = np.rint(weight / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
        return pack_int8(whole, scales)
    assert bits == 4, "8, 4 or 32 bits"
    padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % GROUP)), mode="edge" if weight.size else "constant")
    groups = padded.reshape(len(weight), -1, GROUP)
    minimums = groups.min(2)
    scales = ((groups.max(2) - minimums) / 15).astype(np.float16).astype(np.float32)
    minimums = minimums.astype(np.float16).astype(np.float32)
    whole = np.rint((groups - minimums[..., None]) / np.where(scales > 0, scales, 1)[..., None])
    return pack_int4(whole.clip(0, 15).astype(np.uint8).reshape(padded.shape), scales, minimums, weight.shape[1])


def pack_int8(values: NDArray[np.int8], scales: Floats) -> Packed:
    """Of whole numbers [rows, columns] that count `scales` [rows] each."""
    padded = np.pad(np.asarray(scales, dtype=np.float32).reshape(-1), (0, -len(values) % ROWS))
    return Packed(len(values), values.shape[1], 8, _blocks(values, GROUP), padded)


def pack_int4(values: NDArray[np.uint8], scales: Floats, minimums: Floats, columns: int | None = None) -> Packed:
    """Of 0 .. 15 [rows, groups * GROUP] that stand for scale * value + minimum, both [rows, groups].

    Scales and minimums are kept in half precision, as bits, where the processor reads it.
    """
    rows, wide = values.shape
    halves = values.reshape(rows, -1, 2, GROUP // 2)
    both = halves[:, :, 0] | halves[:, :, 1] << 4  # as GGUF's Q4_1: the second half above the first
    affine = np.concatenate(
        [_blocks(part.astype(np.float16 if HALVES else np.float32), 1) for part in (scales, minimums)], 2
    )
    affine = affine.view(np.uint16) if HALVES else affine
    return Packed(rows, columns or wide, 4, _blocks(both.reshape(rows, -1), GROUP // 2), affine)


def _blocks(matrix: NDArray[Any], group: int) -> NDArray[Any]:
    """[rows, columns] -> [blocks, groups, ROWS * group]."""
    rows, columns = matrix.shape
    padded = np.pad(matrix, ((0, -rows % ROWS), (0, -columns % group)))
    split = padded.reshape(padded.shape[0] // ROWS, ROWS, padded.shape[1] // group, group)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(split.shape[0], split.shape[2], ROWS * group)


def unpack(values: NDArray[Any], scales: NDArray[Any]) -> Floats:
    """The matrix that these arrays of a `Packed` stand for, padding included."""
    blocks, groups, _ = values.shape
    split = values.reshape(blocks, groups, ROWS, -1)
    if values.dtype == np.uint8:
        affine = scales.view(np.float16) if scales.dtype == np.uint16 else scales
        scale, minimum = np.split(affine.astype(np.float32).reshape(blocks, groups, 2 * ROWS, 1), 2, axis=2)
        split = np.concatenate([split & 15, split >> 4], 3) * scale + minimum
    dense: Floats = split.transpose(0, 2, 1, 3).reshape(blocks * ROWS, -1).astype(np.float32)
    if values.dtype == np.int8:
        dense *= np.pad(scales, (0, len(dense) - len(scales)))[:, None]
    return dense


def unpacked_rows(values: NDArray[Any], scales: NDArray[Any], rows: NDArray[np.int64]) -> Floats:
    """Some rows [R] of that matrix, [R, padded]."""
    blocks = rows // ROWS
    if values.dtype == np.int8:
        scales = scales.reshape(-1, ROWS)[blocks].reshape(-1)
    elif values.dtype == np.uint8:
        scales = scales[blocks]
    return unpack(values[blocks], scales)[np.arange(len(rows)) * ROWS + rows % ROWS]


@compiled
def share(size: int, me: int, count: int) -> tuple[int, int]:
    """Which part of `size` rows of weights is this thread's: whole blocks."""
    blocks = (size + ROWS - 1) // ROWS
    return min(blocks * me // count * ROWS, size), min(blocks * (me + 1) // count * ROWS, size)


@compiled
def finest(padded: int) -> int:
    """The whole number that the largest of so many activations becomes."""
    return min(32767, _LARGEST // (128 * GROUP * max(min(padded // GROUP, PIECE), 1)))


@compiled
def quantize(x: Floats, q: Whole, scales: Floats, low: int, high: int) -> None:
    """Rows [low, high) of x [R, K] as whole numbers in q [R, padded] that count `scales` [R] each."""
    apart()
    columns, most = x.shape[1], finest(q.shape[1])
    for r in range(low, high):
        row, rounded = x[r], q[r]
        bits = row.view(np.int32)
        top = np.int32(0)
        for k in range(columns):  # of float32 that are not negative the bits compare as the numbers do
            top = max(top, bits[k] & np.int32(0x7FFFFFFF))
        if top == 0 or top >= 0x7F800000:
            rounded[:] = 0
            scales[r] = 0.0 if top == 0 else np.nan
            continue
        largest = np.float32(0)
        for k in range(columns):
            if bits[k] & np.int32(0x7FFFFFFF) == top:
                largest = abs(row[k])
                break
        factor = np.float32(most) / largest
        if not np.isfinite(factor):  # numbers too small to be told from nothing
            rounded[:] = 0
            scales[r] = 0.0
            continue
        for k in range(columns):
            rounded[k] = np.int16(np.rint(row[k] * factor))
        rounded[columns:] = 0
        scales[r] = largest / np.float32(most)


@compiled
def group_sums(q: Whole, sums: Floats, low: int, high: int) -> None:
    """Of rows [low, high) of q [R, padded] by groups, [R, padded / GROUP]: what 4 bit minimums are multiplied with."""
    for r in range(low, high):
        for group in range(sums.shape[1]):
            total = np.int32(0)
            for k in range(group * GROUP, (group + 1) * GROUP):
                total += np.int32(q[r, k])
            sums[r, group] = np.float32(total)


_int8_1, _int8_2, _int8_3, _int8_4 = (int8_tile(r) for r in (1, 2, 3, 4))
_int4_1, _int4_2, _int4_3, _int4_4 = (int4_tile(r) for r in (1, 2, 3, 4))
_float_1, _float_2, _float_3 = (float_tile(r) for r in (1, 2, 3))


@compiled
def _plan(values: NDArray[Any], low: int, high: int) -> tuple[int, int, int, int]:
    """First and last block of a share, bytes of a block, and blocks in a panel."""
    size = values[0].size * values.itemsize
    return low // ROWS, (high + ROWS - 1) // ROWS, size, max(PANEL // size, 1)


@compiled
def _ahead(block: int, last: int, size: int, wide: int, turn: int, turns: int) -> int:
    """Where one of several passes over a panel asks for its share of the next panel, in bytes from a block on.

    Memory is then read while there is something to compute; one pass alone reads as fast as memory gives.
    """
    return wide * size + size * turn // turns if turns > 1 and block + wide < last else 0


@compiled
def multiply(
    values: NDArray[np.int8], scales: Floats, q: Whole, qscales: Floats, out: Floats, low: int, high: int
) -> None:
    """out[:, low:high] = the rows of q times rows [low, high) of an 8 bit matrix; low and high are from `share`."""
    apart()
    rows, groups, arrays = q.shape[0], values.shape[1], (values, scales, q, qscales, out)
    begin, last, size, wide = _plan(values, low, high)
    turns = (rows + 3) // 4
    stride = size // groups // turns
    for start in range(0, groups, PIECE):
        end = min(start + PIECE, groups)
        for first in range(begin, last, wide):
            for turn in range(turns):
                r, left = 4 * turn, rows - 4 * turn
                for block in range(first, min(first + wide, last)):
                    place = (block, r, _ahead(block, last, size, wide, turn, turns), stride, start, end)
                    if left > 3:
                        _int8_4(arrays, place)
                    elif left == 3:
                        _int8_3(arrays, place)
                    elif left == 2:
                        _int8_2(arrays, place)
                    else:
                        _int8_1(arrays, place)


@compiled
def multiply_int4(
    values: NDArray[np.uint8], scales: NDArray[Any], q: Whole, sums: Floats, qscales: Floats, out: Floats,
    low: int, high: int,
) -> None:  # fmt: skip
    """The same for a 4 bit matrix, with the `group_sums` of q."""
    apart()
    rows, groups, arrays = q.shape[0], values.shape[1], (values, scales, q, sums, qscales, out)
    begin, last, size, wide = _plan(values, low, high)
    turns = (rows + 3) // 4
    stride = size // groups // turns
    for first in range(begin, last, wide):
        for turn in range(turns):
            r, left = 4 * turn, rows - 4 * turn
            for block in range(first, min(first + wide, last)):
                place = (block, r, _ahead(block, last, size, wide, turn, turns), stride, groups)
                if left > 3:
                    _int4_4(arrays, place)
                elif left == 3:
                    _int4_3(arrays, place)
                elif left == 2:
                    _int4_2(arrays, place)
                else:
                    _int4_1(arrays, place)


@compiled
def multiply_float(values: Floats, x: Floats, out: Floats, low: int, high: int) -> None:
    """The same for a float32 matrix and activations [R, padded] as they are."""
    apart()
    rows, groups, arrays = x.shape[0], values.shape[1], (values, x, out)
    begin, last, size, wide = _plan(values, low, high)
    turns = (rows + 2) // 3
    stride = size // groups // turns
    for first in range(begin, last, wide):
        r = 0
        for turn in range(turns):
            left = 2 if rows - r == 4 else min(rows - r, 3)  # two and two are faster than three and one
            for block in range(first, min(first + wide, last)):
                place = (block, r, _ahead(block, last, size, wide, turn, turns), stride, groups)
                if left == 3:
                    _float_3(arrays, place)
                elif left == 2:
                    _float_2(arrays, place)
                else:
                    _float_1(arrays, place)
            r += left


@compiled
def multiply_float_block(values: Floats, x: Floats, out: Floats, block: int, row: int) -> None:
    """One row's products with one block of ROWS rows of weights, the same bits."""
    _float_1((values, x, out), (block, row, 0, 0, values.shape[1]))
