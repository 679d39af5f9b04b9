"""Attention of a row over a slot's cache: the committed text, then the row's own ancestors.

Keys lie in blocks of positions, a dimension's values side by side, so that a block is scored in vectors; values lie row
by row. Rows in flight stand behind the text in the order of their tree; the scores of a row's ancestors are drawn
together, so that everything after sees a plain text. Products are added in the order of positions or dimensions, one at
a time: a row's bits are those of the same text in any tree. Heads that share keys go through a block one after the
other, while it is near.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from outrider.compiled import compiled
from outrider.native.numbers import fma, softmax
from outrider.native.vectors import apart

BLOCK = 64  # positions whose keys lie together, and dimensions of values that are added together
Array = NDArray[np.float32]
_ZERO = np.float32(0.0)


@compiled
def attend(
    queries: Array,  # [heads, D], scaled
    keys: Array,  # [blocks, D, BLOCK]
    values: Array,  # [blocks * BLOCK, D]
    length: int,  # positions of committed text
    sees: NDArray[np.bool_],  # [nodes]: its ancestors among the rows in flight, and itself, the last
    window: int,  # positions that the row sees, itself among them; 0: all
    scores: Array,  # [heads or more, blocks * BLOCK], overwritten
    out: Array,  # [heads, D], overwritten
) -> None:
    apart()
    heads, nodes, straight = len(queries), len(sees), 0
    while straight < nodes and sees[straight]:
        straight += 1
    text = length + straight  # so far positions and places are the same
    end = text
    for node in range(straight, nodes):
        end += sees[node]
    begin = max(0, end - window) if window else 0
    for block in range(begin // BLOCK, (length + nodes + BLOCK - 1) // BLOCK):
        for head in range(heads):
            for j in range(block * BLOCK, (block + 1) * BLOCK):
                scores[head, j] = _ZERO
            _add_columns(queries[head], keys[block], scores[head], block * BLOCK)
    for head in range(heads):
        own, at = scores[head], text
        for node in range(straight, nodes):
            if sees[node]:
                own[at] = own[length + node]
                at += 1
        softmax(own[begin:end])
        for d in range(out.shape[1]):
            out[head, d] = _ZERO
    for first in range(begin, text, BLOCK):
        last = min(first + BLOCK, text)
        for head in range(heads):
            _add(scores[head, first:last], values[first:last], out[head])
    at = text
    for node in range(straight, nodes):
        if sees[node]:
            if at >= begin:
                for head in range(heads):
                    _add(scores[head, at : at + 1], values[length + node : length + node + 1], out[head])
            at += 1


@compiled
def _add(weights: Array, values: Array, out: Array) -> None:
    """Changes `out`: plus weights[j] * values[j], position by position."""
    whole = len(out) // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        _add_columns(weights, values[:, first:], out, first)
    for j in range(len(weights)):
        for d in range(whole, len(out)):
            out[d] = fma(weights[j], values[j, d], out[d])


@intrinsic  # type: ignore[untyped-decorator]
def _add_columns(_typing: Any, factors: Any, matrix: Any, out: Any, first: Any) -> Any:
    """Changes out[first : first + BLOCK]: plus factors[i] * matrix[i, :BLOCK], row by row; the sums stay in registers.

    (factors [n], matrix [n, BLOCK or more], out, first)
    """

    def build(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[ir.Value]) -> ir.Value:
        factors, matrix, out = (
            context.make_array(kind)(context, builder, own)
            for kind, own in zip(signature.args, given[:3], strict=False)
        )
        vector = ir.VectorType(ir.FloatType(), 16)
        add = builder.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(vector, [vector] * 3))
        stride = cgutils.unpack_tuple(builder, matrix.strides)[0]  # in bytes
        place = builder.bitcast(builder.gep(out.data, [given[3]]), vector.as_pointer())
        sums = []
        for part in range(BLOCK // 16):
            sums.append(cgutils.alloca_once(builder, vector))
            builder.store(builder.load(builder.gep(place, [ir.IntType(64)(part)]), align=4), sums[part])
        with cgutils.for_range(builder, cgutils.unpack_tuple(builder, factors.shape)[0]) as loop:
            factor = builder.load(builder.gep(factors.data, [loop.index]))
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), factor, ir.IntType(32)(0))
            every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16))
            row = cgutils.pointer_add(builder, matrix.data, builder.mul(loop.index, stride), vector.as_pointer())
            for part, own in enumerate(sums):
                read = builder.load(builder.gep(row, [ir.IntType(64)(part)]), align=4)
                builder.store(builder.call(add, [every, read, builder.load(own)]), own)
        for part, own in enumerate(sums):
            builder.store(builder.load(own), builder.gep(place, [ir.IntType(64)(part)]), align=4)
        return context.get_dummy_value()

    return types.void(factors, matrix, out, types.int64), build
