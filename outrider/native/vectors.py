"""Vectors: the inner loops of the products, written as vector code that LLVM turns into the processor's own.

Each `..._tile(r)` makes a function that multiplies ROWS rows of weights with r rows of activations and stores their
products: every load serves several of them, and all sums stay in registers. What is added to one result, and in which
order, does not depend on r. Weights are stored so that a tile reads memory in one stream.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

ROWS = 4  # of weights in a tile
GROUP = 32  # weights of a row that lie together; at 4 bits they share a scale
FLOATS = 16  # the same for float32
LINE = 64  # bytes of memory that come together
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()


def _features() -> frozenset[str]:
    """Of the processor that numba compiles for."""
    names = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return frozenset(name[1:] for name in names.split(",") if name.startswith("+"))


FEATURES = _features()
_ARM = platform.machine().lower() in ("arm64", "aarch64")
HALVES = "f16c" in FEATURES or _ARM  # float16 is read by an instruction
# The products of pairs of int16, added: an instruction where there is one.
_PAIRS, _WIDE = (
    ("llvm.x86.avx512.pmaddw.d.512", 32) if "avx512bw" in FEATURES
    else ("llvm.x86.avx2.pmadd.wd", 16) if "avx2" in FEATURES
    else ("", 16)
)  # fmt: skip
_LANES = 16 if "avx512f" in FEATURES else 8 if "avx" in FEATURES else 4  # of float32


def int8_tile(r: int) -> Callable[..., Any]:
    """Of int8 weights and int16 activations: sums over groups [low, high), times both scales.

    (values [N / ROWS, K / GROUP, ROWS * GROUP], scales [N, padded], q [R, K], qscales [R], out [R, N]), (block of rows,
    row, ahead, stride, low, high). Where low is not 0 they are added to what `out` holds: a long row comes in pieces.
    """

    def body(b: ir.IRBuilder, arrays: Sequence[_Array], numbers: Sequence[ir.Value]) -> None:
        values, scales, q, qscales, out = arrays
        block, row, ahead, stride, low, high = numbers
        kind = ir.VectorType(_I32, _WIDE // 2)
        sums = [[_variable(b, ir.Constant(kind, None)) for _ in range(r)] for _ in range(ROWS)]
        for some in _passes(r, 8):
            with _each(b, low, high) as group:
                if 0 in some:
                    _ask_ahead(b, values, block, group, ahead, stride, 2)
                for part in range(0, GROUP, _WIDE):
                    at = b.add(b.mul(group, _I64(GROUP)), _I64(part))
                    weights = [values.vector(_WIDE, block, group, GROUP * i + part) for i in some]
                    wide = [b.sext(own, ir.VectorType(_I16, _WIDE)) for own in weights]
                    for j in range(r):
                        _in_turn(b)
                        read = q.vector(_WIDE, _plus(b, row, j), at)
                        for i, own in zip(some, wide, strict=True):
                            b.store(_add_pairs(b, b.load(sums[i][j]), own, read), sums[i][j])
                    _in_turn(b)
        again = b.icmp_signed(">", low, _I64(0))
        scale = scales.vector(ROWS, b.mul(block, _I64(ROWS)))
        for j in range(r):
            at = _plus(b, row, j)
            total = b.sitofp(_totals(b, [b.load(own[j]) for own in sums], b.add), scale.type)
            total = b.fmul(total, b.fmul(scale, _spread(b, b.load(qscales.at(at)), ROWS)))
            _store(b, total, out, at, block, again)

    return _function(body)


def int4_tile(r: int) -> Callable[..., Any]:
    """Of weights scale * (0 .. 15) + minimum by groups, and int16 activations with the sums of their groups.

    (values [N / ROWS, K / GROUP, ROWS * GROUP / 2], scales then minimums [N / ROWS, K / GROUP, 2 * ROWS], q [R, K],
    sums [R, K / GROUP], qscales [R], out [R, N]), (block of rows, row, ahead, stride, groups). Whole numbers within a
    group, float32 across them.
    """

    def body(b: ir.IRBuilder, arrays: Sequence[_Array], numbers: Sequence[ir.Value]) -> None:
        values, scales, q, qsums, qscales, out = arrays
        block, row, ahead, stride, groups = numbers
        lanes = _WIDE // 2
        half, floats, four = GROUP // 2, ir.VectorType(_F32, lanes), ir.VectorType(_F32, ROWS)
        sums = [[_variable(b, _zeros(floats)) for _ in range(r)] for _ in range(ROWS)]
        lows = [_variable(b, _zeros(four)) for _ in range(r)]
        low = ir.Constant(ir.VectorType(_I8, half), [_I8(15)] * half)
        shift = ir.Constant(ir.VectorType(_I8, half), [_I8(4)] * half)
        for some in _passes(r, 4):
            with _each(b, _I64(0), groups) as group:
                if 0 in some:
                    _ask_ahead(b, values, block, group, ahead, stride, 1)
                both = scales.vector(2 * ROWS, block, group, 0)
                both = both if both.type.element == _F32 else b.fpext(both, ir.VectorType(_F32, 2 * ROWS))
                at = b.mul(group, _I64(GROUP))
                read = [
                    [q.vector(_WIDE, _plus(b, row, j), _plus(b, at, part)) for part in range(0, GROUP, _WIDE)]
                    for j in range(r)
                ]
                for j in range(r if 0 in some else 0):
                    seen = _spread(b, b.load(qsums.at(_plus(b, row, j), group)), ROWS)
                    minimums = _lanes(b, both, range(ROWS, 2 * ROWS))
                    b.store(_fma(b, minimums, seen, b.load(lows[j])), lows[j])
                for i in some:
                    packed = values.vector(half, block, group, half * i)
                    halves = (b.and_(packed, low), b.lshr(packed, shift))
                    whole = [b.zext(own, ir.VectorType(_I16, half)) for own in halves]
                    parts = whole if half == _WIDE else [_joined(b, *whole)]
                    scale = _lanes(b, both, [i] * lanes)
                    for j in range(r):
                        total: ir.Value = ir.Constant(ir.VectorType(_I32, lanes), None)
                        for part, own in zip(parts, read[j], strict=True):
                            total = _add_pairs(b, total, part, own)
                        b.store(_fma(b, b.sitofp(total, floats), scale, b.load(sums[i][j])), sums[i][j])
        for j in range(r):
            at = _plus(b, row, j)
            total = b.fadd(_totals(b, [b.load(own[j]) for own in sums], b.fadd), b.load(lows[j]))
            _store(b, b.fmul(total, _spread(b, b.load(qscales.at(at)), ROWS)), out, at, block)

    return _function(body)


def float_tile(r: int) -> Callable[..., Any]:
    """Of float32 weights and activations.

    (values [N / ROWS, K / FLOATS, ROWS * FLOATS], x [R, K], out [R, N]), (block of rows, row, ahead, stride, groups).
    """

    def body(b: ir.IRBuilder, arrays: Sequence[_Array], numbers: Sequence[ir.Value]) -> None:
        values, x, out = arrays
        block, row, ahead, stride, groups = numbers
        sums = [[_variable(b, _zeros(ir.VectorType(_F32, _LANES))) for _ in range(r)] for _ in range(ROWS)]
        for some in _passes(r, 12):
            with _each(b, _I64(0), groups) as group:
                if 0 in some:
                    _ask_ahead(b, values, block, group, ahead, stride, 4)
                for part in range(0, FLOATS, _LANES):
                    at = b.add(b.mul(group, _I64(FLOATS)), _I64(part))
                    read = [x.vector(_LANES, _plus(b, row, j), at) for j in range(r)]
                    for i in some:
                        _in_turn(b)
                        weights = values.vector(_LANES, block, group, FLOATS * i + part)
                        for j in range(r):
                            b.store(_fma(b, weights, read[j], b.load(sums[i][j])), sums[i][j])
                    _in_turn(b)
        for j in range(r):
            _store(b, _totals(b, [b.load(own[j]) for own in sums], b.fadd), out, _plus(b, row, j), block)

    return _function(body)


def dot_tile(n: int) -> Callable[..., Any]:
    """Of n rows of a float32 matrix as numpy has it, and one vector: sums over a multiple of FLOATS columns.

    (matrix [N, K], x [K], out [N]), (row).
    """

    def body(b: ir.IRBuilder, arrays: Sequence[_Array], numbers: Sequence[ir.Value]) -> None:
        matrix, x, out = arrays
        (row,) = numbers
        sums = [_variable(b, _zeros(ir.VectorType(_F32, _LANES))) for _ in range(n)]
        with _each(b, _I64(0), b.udiv(x.shape[0], _I64(_LANES))) as group:
            at = b.mul(group, _I64(_LANES))
            read = x.vector(_LANES, at)
            for i in range(n):
                own = matrix.vector(_LANES, _plus(b, row, i), at)
                b.store(_fma(b, own, read, b.load(sums[i])), sums[i])
        for i in range(n):
            b.store(_total(b, b.load(sums[i]), b.fadd), out.at(_plus(b, row, i)))

    return _function(body)


@intrinsic  # type: ignore[untyped-decorator]
def apart(_typing: Any) -> Any:
    """The compiled function that calls this is never copied into its callers, which would take seconds to compile."""

    def build(context: Any, builder: ir.IRBuilder, _signature: Any, _given: Sequence[ir.Value]) -> ir.Value:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


class _Array:
    """A contiguous numpy array inside a function that is being built; uint16 are the bits of float16."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: types.Array, value: ir.Value) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.builder, self.data = builder, array.data
        self.shape = cgutils.unpack_tuple(builder, array.shape)
        self.kind = ir.HalfType() if kind.dtype == types.uint16 else context.get_data_type(kind.dtype)

    def at(self, *place: ir.Value | int) -> ir.Value:
        """The address of a value."""
        offset: ir.Value = _I64(0)
        for index, size in zip(place, self.shape, strict=True):
            own = _I64(index) if isinstance(index, int) else index
            offset = self.builder.add(self.builder.mul(offset, size), own)
        return self.builder.gep(self.data, [offset])

    def vector(self, count: int, *place: ir.Value | int) -> ir.Value:
        """`count` values from there on."""
        address = self.builder.bitcast(self.at(*place), ir.VectorType(self.kind, count).as_pointer())
        return self.builder.load(address, align=1, typ=ir.VectorType(self.kind, count))


def _function(body: Callable[..., None]) -> Callable[..., Any]:
    """What compiled code calls with a tuple of contiguous arrays and one of numbers."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_typing: Any, arrays: Any, numbers: Any) -> Any:
        assert all(kind.layout == "C" for kind in arrays), "tiles read contiguous arrays"

        def built(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
            every, numbers = (cgutils.unpack_tuple(builder, own) for own in given)
            kinds = zip(signature.args[0], every, strict=True)
            body(builder, [_Array(context, builder, kind, own) for kind, own in kinds], numbers)
            return context.get_dummy_value()

        return types.void(arrays, types.UniTuple(types.int64, len(numbers))), built

    return tile


def _passes(r: int, most: int) -> list[range]:
    """Which rows of a block go through together: as many as have at most so many sums with r rows of activations."""
    count = next(n for n in (4, 2, 1) if n * r <= most)
    return [range(i, i + count) for i in range(0, ROWS, count)]


def _ask_ahead(
    b: ir.IRBuilder, values: _Array, block: ir.Value, group: ir.Value, ahead: ir.Value, stride: ir.Value, lines: int
) -> None:
    """Weights that come later are fetched into the middle cache: `ahead` bytes from a block on, `stride` a group.

    Not into the nearest one, where they would push out what is in use.
    """
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    fetch = b.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    first = b.gep(b.bitcast(values.at(block, 0, 0), pointer), [b.add(ahead, b.mul(group, stride))])
    for line in range(lines):
        b.call(fetch, [b.gep(first, [_I64(LINE * line)]), _I32(0), _I32(2), _I32(1)])


def _in_turn(b: ir.IRBuilder) -> None:
    """What is read behind this is not read before it: else LLVM reads early, has too few registers and stores sums."""
    b.fence("acq_rel", "singlethread")


@contextmanager
def _each(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> Iterator[ir.Value]:
    with cgutils.for_range_slice(b, low, high, _I64(1)) as (index, _):
        yield index


def _store(
    b: ir.IRBuilder, results: ir.Value, out: _Array, row: ir.Value, block: ir.Value, again: ir.Value | None = None
) -> None:
    """The results of a block of weights, without its padding; `again`: on top of what is there."""
    first = b.mul(block, _I64(ROWS))

    def put(value: ir.Value, own: ir.Value) -> None:
        place = b.bitcast(out.at(row, own), value.type.as_pointer())
        if again is not None:
            held = b.load(place, align=4)
            value = b.select(again, b.fadd(value, held), value)
        b.store(value, place, align=4)

    whole = b.icmp_signed("<=", _plus(b, first, ROWS), out.shape[-1])
    with b.if_else(whole, likely=True) as (then, otherwise):
        with then:
            put(results, first)
        with otherwise:
            for i in range(ROWS):
                own = _plus(b, first, i)
                with b.if_then(b.icmp_signed("<", own, out.shape[-1])):
                    put(b.extract_element(results, _I32(i)), own)


def _variable(b: ir.IRBuilder, start: ir.Constant) -> ir.Value:
    """LLVM keeps it in a register."""
    place = cgutils.alloca_once(b, start.type)
    b.store(start, place)
    return place


def _zeros(kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [ir.Constant(kind.element, 0.0)] * kind.count)


def _plus(b: ir.IRBuilder, value: ir.Value, constant: int) -> ir.Value:
    return b.add(value, _I64(constant))


def _add_pairs(b: ir.IRBuilder, sums: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """The products of two vectors of int16 on top of half as many sums."""
    count, kind = x.type.count, sums.type
    if _PAIRS:
        own = b.module.declare_intrinsic(_PAIRS, (), ir.FunctionType(kind, [x.type, y.type]))
        return b.add(sums, b.call(own, [x, y]))
    for start in (0, count // 2):
        halves = [b.sext(_lanes(b, v, range(start, start + count // 2)), kind) for v in (x, y)]
        sums = b.add(sums, b.mul(*halves))
    return sums


def _lanes(b: ir.IRBuilder, vector: ir.Value, chosen: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), _mask(chosen))


def _joined(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.shuffle_vector(x, y, _mask(range(2 * x.type.count)))


def _mask(chosen: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, len(chosen)), [_I32(lane) for lane in chosen])


def _spread(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """In every lane."""
    vector = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return _lanes(b, b.insert_element(vector, value, _I32(0)), [0] * count)


def _total(b: ir.IRBuilder, vector: ir.Value, add: Callable[..., ir.Value]) -> ir.Value:
    """The sum over the lanes: halves on each other until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        vector = add(_lanes(b, vector, range(count)), _lanes(b, vector, range(count, 2 * count)))
    return b.extract_element(vector, _I32(0))


def _totals(b: ir.IRBuilder, vectors: Sequence[ir.Value], add: Callable[..., ir.Value]) -> ir.Value:
    """The `_total` of each of ROWS vectors, in the same order of additions."""
    while (count := vectors[0].type.count) > ROWS:
        low, high = range(count // 2), range(count // 2, count)
        vectors = [add(_lanes(b, own, low), _lanes(b, own, high)) for own in vectors]
    w, x, y, z = vectors
    pairs = [
        add(b.shuffle_vector(one, two, _mask((0, 4, 1, 5))), b.shuffle_vector(one, two, _mask((2, 6, 3, 7))))
        for one, two in ((w, x), (y, z))
    ]
    return add(b.shuffle_vector(*pairs, _mask((0, 1, 4, 5))), b.shuffle_vector(*pairs, _mask((2, 3, 6, 7))))


def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once where the processor has that, else twice."""
    if "fma" not in FEATURES and not _ARM:
        return b.fadd(b.fmul(x, y), z)
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(b.module.declare_intrinsic(f"llvm.fma.v{x.type.count}f32", (), kind), [x, y, z])
