"""The order in which attention adds, in Triton: cuts of the context at fixed positions, and what joins them.

In a cut blocks of keys go through one running softmax; cuts are joined from the first on, one at a time, by whoever
comes to it: a program that has all of them, or the launch that follows. Either does the same arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.runtime.cuda.same_bits.places import branches, on_path, sequence_of
from outrider.runtime.cuda.tree_attention import LOG2E

NEAR, SHORT, LONG = 2048, 128, 512  # cuts are SHORT before position NEAR and LONG behind it
_NEAR, _SHORT, _LONG = tl.constexpr(NEAR), tl.constexpr(SHORT), tl.constexpr(LONG)


def cuts(capacity: int) -> int:
    """Cuts of a context of so many positions."""
    return triton.cdiv(min(capacity, NEAR), SHORT) + triton.cdiv(max(0, capacity - NEAR), LONG)


@triton.jit
def cut_of(position):
    far = (position - _NEAR) // _LONG + _NEAR // _SHORT
    return tl.where(position < _NEAR, position // _SHORT, far)


@triton.jit
def cut_begin(cut):
    return tl.where(cut < _NEAR // _SHORT, cut * _SHORT, _NEAR + (cut - _NEAR // _SHORT) * _LONG)


@triton.jit
def add_cut(most, mass, whole, largest, weight, total):
    """One more cut behind those that are joined already."""
    top = tl.maximum(most, largest)
    anchor = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    old, new = tl.exp2(most - anchor), tl.exp2(largest - anchor)
    return top, mass * old + weight * new, whole * old[:, None] + total * new[:, None]


@triton.jit
def finish(sinks, query_at, real, largest, weight, total, HAS_SINKS: tl.constexpr):
    if HAS_SINKS:
        sink = tl.load(sinks + query_at, mask=real, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(largest, sink)
        fade = tl.exp2(largest - top)
        total = total * fade[:, None]
        weight = weight * fade + tl.exp2(sink - top)
    return total / tl.where(weight > 0, weight, 1.0)[:, None]


@triton.jit(do_not_specialize=("window", "sequences", "rows", "places"))
def join(
    slots, lengths, nodes, begins, counts, causal, words, sinks, out, partial, sums, window, sequences, rows, places,
    VALUE_DIM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr, WORDS: tl.constexpr,
    MANY: tl.constexpr, WIDE_VALUE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, FOLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's cuts one after another, where no program had all of them."""
    row, head = tl.program_id(0), tl.program_id(1)
    g, dv = tl.arange(0, GROUPED), tl.arange(0, WIDE_VALUE)
    batch = sequence_of(begins, row, sequences, MANY)
    base, count = tl.load(begins + batch).to(tl.int32), tl.load(counts + batch).to(tl.int32)
    length, in_flight = tl.load(lengths + batch).to(tl.int32), tl.load(nodes + batch).to(tl.int32)
    split = branches(words, base, count, in_flight, tl.load(causal + batch), WORDS)
    real = g < GROUP
    query_at = head * GROUP + g
    position = length + in_flight - count + row - base
    if split:
        one = tl.load(words + row * WORDS)
        two = one
        if WORDS > 1:
            two = tl.load(words + row * WORDS + 1)
        position = length + tl.sum(on_path(one, two, WORDS), 0) - 1
    low, high = position * 0, cut_of(position) + 1
    if HAS_WINDOW:
        low = cut_of(tl.maximum(position - window + 1, 0))
    if FOLD:
        high = high - cut_of(length) + 1
        low = low * 0
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    needed = row - base < count
    if FOLD:
        needed = needed & split
    if needed:
        half = rows * HEADS * GROUP * places
        spot = (row * HEADS * GROUP + query_at) * places
        most = tl.full([GROUPED], float("-inf"), tl.float32)
        mass = tl.zeros([GROUPED], tl.float32)
        whole = tl.zeros([GROUPED, WIDE_VALUE], tl.float32)
        for cut in tl.range(low, high, num_stages=4):
            at = spot + cut
            largest = tl.load(sums + at, mask=real, other=float("-inf"))
            weight = tl.load(sums + half + at, mask=real, other=0.0)
            total = tl.load(
                partial + at.to(tl.int64)[:, None] * WIDE_VALUE + dv[None, :], mask=real[:, None], other=0.0
            )
            most, mass, whole = add_cut(most, mass, whole, largest, weight, total)
        value = finish(sinks, query_at, real, most, mass, whole, HAS_SINKS)
        to = out + (row * HEADS * GROUP + query_at)[:, None] * VALUE_DIM + dv[None, :]
        tl.store(to, value, mask=real[:, None] & (dv < VALUE_DIM)[None, :])
