"""Vectors: the inner loops of the products, written as vector code that LLVM turns into the processor's own.

Each `..._tile(r)` makes a function that multiplies ROWS rows of weights with r rows of activations and stores their
products: every load serves several of them, and all sums stay in registers. What is added to one result, and in which
order, does not depend on r. Weights are stored so that a tile reads memory in one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from outrider.core.numeric.llvm import (
    ARM,
    F32,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    LINE,
    Array,
    each,
    fetch,
    fma,
    folded,
    function,
    in_turn,
    joined,
    mask,
    picked,
    plus,
    spread,
    variable,
    zeros,
)

ROWS = 4  # of weights in a tile
GROUP = 32  # weights of a row that lie together; at 4 bits they share a scale
FLOATS = 16  # the same for float32
HALVES = "f16c" in FEATURES or ARM  # float16 is read by an instruction
# The products of pairs of int16, added: an instruction where there is one.
_PAIRS, _WIDE = (
    ("llvm.x86.avx512.pmaddw.d.512", 32) if "avx512bw" in FEATURES
    else ("llvm.x86.avx2.pmadd.wd", 16) if "avx2" in FEATURES
    else ("", 16)
)  # fmt: skip


def int8_tile(r: int) -> Callable[..., Any]:
    """Of int8 weights and int16 activations: sums over groups [low, high), times both scales.

    (values [N / ROWS, K / GROUP, ROWS * GROUP], scales [N, padded], q [R, K], qscales [R], out [R, N]), (block of rows,
    row, ahead, stride, low, high). Where low is not 0 they are added to what `out` holds: a long row comes in pieces.
    """

    def body(b: ir.IRBuilder, arrays: Sequence[Array], numbers: Sequence[ir.Value]) -> None:
        values, scales, q, qscales, out = arrays
        block, row, ahead, stride, low, high = numbers
        kind = ir.VectorType(I32, _WIDE // 2)
        sums = [[variable(b, ir.Constant(kind, None)) for _ in range(r)] for _ in range(ROWS)]
        for some in _passes(r, 8):
            with each(b, low, high) as group:
                if 0 in some:
                    _ask_ahead(b, values, block, group, ahead, stride, 2)
                for part in range(0, GROUP, _WIDE):
                    at = b.add(b.mul(group, I64(GROUP)), I64(part))
                    weights = [values.vector(_WIDE, block, group, GROUP * i + part) for i in some]
                    wide = [b.sext(chunk, ir.VectorType(I16, _WIDE)) for chunk in weights]
                    for j in range(r):
                        in_turn(b)
                        read = q.vector(_WIDE, plus(b, row, j), at)
                        for i, chunk in zip(some, wide, strict=True):
                            b.store(_add_pairs(b, b.load(sums[i][j]), chunk, read), sums[i][j])
                    in_turn(b)
        again = b.icmp_signed(">", low, I64(0))
        scale = scales.vector(ROWS, b.mul(block, I64(ROWS)))
        for j in range(r):
            at = plus(b, row, j)
            total = b.sitofp(_totals(b, [b.load(lane[j]) for lane in sums], b.add), scale.type)
            total = b.fmul(total, b.fmul(scale, spread(b, b.load(qscales.at(at)), ROWS)))
            _store(b, total, out, at, block, again)

    return function(body)


def int4_tile(r: int) -> Callable[..., Any]:
    """Of weights scale * (0 .. 15) + minimum by groups, and int16 activations with the sums of their groups.

    (values [N / ROWS, K / GROUP, ROWS * GROUP / 2], scales then minimums [N / ROWS, K / GROUP, 2 * ROWS], q [R, K],
    sums [R, K / GROUP], qscales [R], out [R, N]), (block of rows, row, ahead, stride, groups). Whole numbers within a
    group, float32 across them.
    """

    def body(b: ir.IRBuilder, arrays: Sequence[Array], numbers: Sequence[ir.Value]) -> None:
        values, scales, q, qsums, qscales, out = arrays
        block, row, ahead, stride, groups = numbers
        lanes = _WIDE // 2
        half, floats, four = GROUP // 2, ir.VectorType(F32, lanes), ir.VectorType(F32, ROWS)
        sums = [[variable(b, zeros(floats)) for _ in range(r)] for _ in range(ROWS)]
        lows = [variable(b, zeros(four)) for _ in range(r)]
        low = ir.Constant(ir.VectorType(I8, half), [I8(15)] * half)
        shift = ir.Constant(ir.VectorType(I8, half), [I8(4)] * half)
        for some in _passes(r, 4):
            with each(b, I64(0), groups) as group:
                if 0 in some:
                    _ask_ahead(b, values, block, group, ahead, stride, 1)
                both = scales.vector(2 * ROWS, block, group, 0)
                both = both if both.type.element == F32 else b.fpext(both, ir.VectorType(F32, 2 * ROWS))
                at = b.mul(group, I64(GROUP))
                read = [
                    [q.vector(_WIDE, plus(b, row, j), plus(b, at, part)) for part in range(0, GROUP, _WIDE)]
                    for j in range(r)
                ]
                for j in range(r if 0 in some else 0):
                    seen = spread(b, b.load(qsums.at(plus(b, row, j), group)), ROWS)
                    minimums = picked(b, both, range(ROWS, 2 * ROWS))
                    b.store(fma(b, minimums, seen, b.load(lows[j])), lows[j])
                for i in some:
                    packed = values.vector(half, block, group, half * i)
                    halves = (b.and_(packed, low), b.lshr(packed, shift))
                    whole = [b.zext(chunk, ir.VectorType(I16, half)) for chunk in halves]
                    parts = whole if half == _WIDE else [joined(b, *whole)]
                    scale = picked(b, both, [i] * lanes)
                    for j in range(r):
                        total: ir.Value = ir.Constant(ir.VectorType(I32, lanes), None)
                        for part, chunk in zip(parts, read[j], strict=True):
                            total = _add_pairs(b, total, part, chunk)
                        b.store(fma(b, b.sitofp(total, floats), scale, b.load(sums[i][j])), sums[i][j])
        for j in range(r):
            at = plus(b, row, j)
            total = b.fadd(_totals(b, [b.load(lane[j]) for lane in sums], b.fadd), b.load(lows[j]))
            _store(b, b.fmul(total, spread(b, b.load(qscales.at(at)), ROWS)), out, at, block)

    return function(body)


def float_tile(r: int) -> Callable[..., Any]:
    """Of float32 weights and activations.

    (values [N / ROWS, K / FLOATS, ROWS * FLOATS], x [R, K], out [R, N]), (block of rows, row, ahead, stride, groups).
    """

    def body(b: ir.IRBuilder, arrays: Sequence[Array], numbers: Sequence[ir.Value]) -> None:
        values, x, out = arrays
        block, row, ahead, stride, groups = numbers
        sums = [[variable(b, zeros(ir.VectorType(F32, LANES))) for _ in range(r)] for _ in range(ROWS)]
        for some in _passes(r, 12):
            with each(b, I64(0), groups) as group:
                if 0 in some:
                    _ask_ahead(b, values, block, group, ahead, stride, 4)
                for part in range(0, FLOATS, LANES):
                    at = b.add(b.mul(group, I64(FLOATS)), I64(part))
                    read = [x.vector(LANES, plus(b, row, j), at) for j in range(r)]
                    for i in some:
                        in_turn(b)
                        weights = values.vector(LANES, block, group, FLOATS * i + part)
                        for j in range(r):
                            b.store(fma(b, weights, read[j], b.load(sums[i][j])), sums[i][j])
                    in_turn(b)
        for j in range(r):
            _store(b, _totals(b, [b.load(lane[j]) for lane in sums], b.fadd), out, plus(b, row, j), block)

    return function(body)


def dot_tile(n: int) -> Callable[..., Any]:
    """Of n rows of a float32 matrix as numpy has it, and one vector: sums over a multiple of FLOATS columns.

    (matrix [N, K], x [K], out [N]), (row).
    """

    def body(b: ir.IRBuilder, arrays: Sequence[Array], numbers: Sequence[ir.Value]) -> None:
        matrix, x, out = arrays
        (row,) = numbers
        sums = [variable(b, zeros(ir.VectorType(F32, LANES))) for _ in range(n)]
        with each(b, I64(0), b.udiv(x.shape[0], I64(LANES))) as group:
            at = b.mul(group, I64(LANES))
            read = x.vector(LANES, at)
            for i in range(n):
                loaded = matrix.vector(LANES, plus(b, row, i), at)
                b.store(fma(b, loaded, read, b.load(sums[i])), sums[i])
        for i in range(n):
            b.store(folded(b, b.load(sums[i]), b.fadd), out.at(plus(b, row, i)))

    return function(body)


def _passes(r: int, most: int) -> list[range]:
    """Which rows of a block go through together: as many as have at most so many sums with r rows of activations."""
    count = next(n for n in (4, 2, 1) if n * r <= most)
    return [range(i, i + count) for i in range(0, ROWS, count)]


def _ask_ahead(
    b: ir.IRBuilder, values: Array, block: ir.Value, group: ir.Value, ahead: ir.Value, stride: ir.Value, lines: int
) -> None:
    """Weights that come later are fetched: `ahead` bytes from a block on, `stride` a group."""
    first = b.gep(b.bitcast(values.at(block, 0, 0), I8.as_pointer()), [b.add(ahead, b.mul(group, stride))])
    for line in range(lines):
        fetch(b, b.gep(first, [I64(LINE * line)]))


def _store(
    b: ir.IRBuilder, results: ir.Value, out: Array, row: ir.Value, block: ir.Value, again: ir.Value | None = None
) -> None:
    """The results of a block of weights, without its padding; `again`: on top of what is there."""
    first = b.mul(block, I64(ROWS))

    def put(value: ir.Value, column: ir.Value) -> None:
        place = b.bitcast(out.at(row, column), value.type.as_pointer())
        if again is not None:
            held = b.load(place, align=4)
            value = b.select(again, b.fadd(value, held), value)
        b.store(value, place, align=4)

    whole = b.icmp_signed("<=", plus(b, first, ROWS), out.shape[-1])
    with b.if_else(whole, likely=True) as (then, otherwise):
        with then:
            put(results, first)
        with otherwise:
            for i in range(ROWS):
                column = plus(b, first, i)
                with b.if_then(b.icmp_signed("<", column, out.shape[-1])):
                    put(b.extract_element(results, I32(i)), column)


def _add_pairs(b: ir.IRBuilder, sums: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """The products of two vectors of int16 on top of half as many sums."""
    count, kind = x.type.count, sums.type
    if _PAIRS:
        pairs = b.module.declare_intrinsic(_PAIRS, (), ir.FunctionType(kind, [x.type, y.type]))
        return b.add(sums, b.call(pairs, [x, y]))
    for start in (0, count // 2):
        halves = [b.sext(picked(b, v, range(start, start + count // 2)), kind) for v in (x, y)]
        sums = b.add(sums, b.mul(*halves))
    return sums


def _totals(b: ir.IRBuilder, vectors: Sequence[ir.Value], add: Callable[..., ir.Value]) -> ir.Value:
    """The `total` of each of ROWS vectors, in the same order of additions."""
    while (count := vectors[0].type.count) > ROWS:
        low, high = range(count // 2), range(count // 2, count)
        vectors = [add(picked(b, vector, low), picked(b, vector, high)) for vector in vectors]
    w, x, y, z = vectors
    pairs = [
        add(b.shuffle_vector(one, two, mask((0, 4, 1, 5))), b.shuffle_vector(one, two, mask((2, 6, 3, 7))))
        for one, two in ((w, x), (y, z))
    ]
    return add(b.shuffle_vector(*pairs, mask((0, 1, 4, 5))), b.shuffle_vector(*pairs, mask((2, 3, 6, 7))))
