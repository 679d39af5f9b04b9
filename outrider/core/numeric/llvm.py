"""LLVM: what vector code is put together from, which LLVM turns into the processor's own.

Numba hands a function that is being compiled to a builder of LLVM's; these are the words in which loops over vectors
are written there.
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

LINE = 64  # bytes of memory that come together
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


def _features() -> frozenset[str]:
    """Of the processor that numba compiles for."""
    names = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return frozenset(name[1:] for name in names.split(",") if name.startswith("+"))


FEATURES = _features()
ARM = platform.machine().lower() in ("arm64", "aarch64")
LANES = 16 if "avx512f" in FEATURES else 8 if "avx" in FEATURES else 4  # of float32


@intrinsic  # type: ignore[untyped-decorator]
def apart(_typing: Any) -> Any:
    """The compiled function that calls this is never copied into its callers, which would take seconds to compile."""

    def build(context: Any, builder: ir.IRBuilder, _signature: Any, _given: Sequence[ir.Value]) -> ir.Value:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic  # type: ignore[untyped-decorator]
def address(_typing: Any, array: Any) -> Any:
    """Of an array's first value."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, given[0]).data, I64)

    return types.int64(array), build


class Array:
    """A contiguous numpy array inside a function that is being built; uint16 are the bits of float16."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: types.Array, value: ir.Value) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.builder, self.data = builder, array.data
        self.shape = cgutils.unpack_tuple(builder, array.shape)
        self.kind = ir.HalfType() if kind.dtype == types.uint16 else context.get_data_type(kind.dtype)

    def at(self, *place: ir.Value | int) -> ir.Value:
        """The address of a value."""
        offset: ir.Value = I64(0)
        for index, size in zip(place, self.shape, strict=True):
            number = I64(index) if isinstance(index, int) else index
            offset = self.builder.add(self.builder.mul(offset, size), number)
        return self.builder.gep(self.data, [offset])

    def vector(self, count: int, *place: ir.Value | int) -> ir.Value:
        """`count` values from there on."""
        address = self.builder.bitcast(self.at(*place), ir.VectorType(self.kind, count).as_pointer())
        return self.builder.load(address, align=1, typ=ir.VectorType(self.kind, count))


def function(body: Callable[..., None]) -> Callable[..., Any]:
    """What compiled code calls with a tuple of contiguous arrays and one of numbers."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_typing: Any, arrays: Any, numbers: Any) -> Any:
        assert all(kind.layout == "C" for kind in arrays), "tiles read contiguous arrays"

        def built(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
            every, numbers = (cgutils.unpack_tuple(builder, packed) for packed in given)
            kinds = zip(signature.args[0], every, strict=True)
            body(builder, [Array(context, builder, kind, value) for kind, value in kinds], numbers)
            return context.get_dummy_value()

        return types.void(arrays, types.UniTuple(types.int64, len(numbers))), built

    return tile


def in_turn(b: ir.IRBuilder) -> None:
    """What is read behind this is not read before it: else LLVM reads early, has too few registers and stores sums."""
    b.fence("acq_rel", "singlethread")


def fetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """A line of memory that comes later goes to the middle cache: in the nearest it would push out what is in use."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    b.call(b.module.declare_intrinsic("llvm.prefetch", [I8.as_pointer()], kind), [address, I32(0), I32(2), I32(1)])


@contextmanager
def each(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> Iterator[ir.Value]:
    with cgutils.for_range_slice(b, low, high, I64(1)) as (index, _):
        yield index


def variable(b: ir.IRBuilder, start: ir.Value) -> ir.Value:
    """LLVM keeps it in a register."""
    place = cgutils.alloca_once(b, start.type)
    b.store(start, place)
    return place


def zeros(kind: ir.VectorType) -> ir.Constant:
    return constant(kind, 0.0)


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """In every lane, if it is a vector."""
    return ir.Constant(kind, [kind.element(value)] * kind.count if isinstance(kind, ir.VectorType) else value)


def plus(b: ir.IRBuilder, value: ir.Value, constant: int) -> ir.Value:
    return b.add(value, I64(constant))


def picked(b: ir.IRBuilder, vector: ir.Value, chosen: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask(chosen))


def joined(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.shuffle_vector(x, y, mask(range(2 * x.type.count)))


def mask(chosen: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(chosen)), [I32(lane) for lane in chosen])


def spread(b: ir.IRBuilder, value: ir.Value, count: int) -> ir.Value:
    """In every lane."""
    vector = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    return picked(b, b.insert_element(vector, value, I32(0)), [0] * count)


def folded(b: ir.IRBuilder, vector: ir.Value, add: Callable[..., ir.Value]) -> ir.Value:
    """The sum (or what `add` makes) over the lanes: halves on each other until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        vector = add(picked(b, vector, range(count)), picked(b, vector, range(count, 2 * count)))
    return b.extract_element(vector, I32(0))


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once where the processor has that, else twice."""
    if "fma" not in FEATURES and not ARM:
        return b.fadd(b.fmul(x, y), z)
    return fused(b, x, y, z)


def fused(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once: of vectors or of single values."""
    name = f"llvm.fma.v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "llvm.fma.f32"
    return b.call(b.module.declare_intrinsic(name, (), ir.FunctionType(x.type, [x.type] * 3)), [x, y, z])
