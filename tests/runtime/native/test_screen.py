"""The largest product by an eight-bit copy: the bits of all products computed, whatever the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.runtime.native.kernels import screen
from outrider.runtime.native.kernels.linear import multiply_float, pack, quantize
from outrider.runtime.native.kernels.products import Linear, PreparedRows
from outrider.runtime.native.kernels.screen import Screen, screen_of, screened
from outrider.runtime.native.kernels.team import Team

Floats = NDArray[np.float32]
shapes = st.tuples(st.integers(1, 300), st.integers(1, 90), st.integers(1, 6))  # weights' rows, columns, rows
seeds = st.integers(0, 2**32 - 1)
TEAMS = {count: Team(count) for count in (1, 2, 3)}


def exactly(weight: Floats, x: Floats) -> Floats:
    packed, out = pack(weight, 32), np.empty((len(x), len(weight)), dtype=np.float32)
    multiply_float(packed.values, wide(x, packed.padded), out, 0, len(weight))
    return out


def wide(x: Floats, columns: int) -> Floats:
    return np.ascontiguousarray(np.pad(x, ((0, 0), (0, columns - x.shape[1]))))


def nearly(by: Screen, x: Floats) -> tuple[NDArray[np.int16], Floats]:
    q = np.zeros((len(x), by.linear.values.shape[2] * 32), dtype=np.int16)
    scales = np.zeros(len(x), dtype=np.float32)
    quantize(x, q, scales, 0, len(x))
    return q, scales


def largest(weight: Floats, x: Floats, threads: int = 1, by: Screen | None = None) -> tuple[Floats, NDArray[np.int64]]:
    """What the screen leaves of all products, and the place of each row's largest."""
    by, packed, rows = by or screen_of(weight), pack(weight, 32), len(x)
    head = Linear(packed.values[None], packed.scales[None], np.zeros((1, 0), np.float32))
    none = np.zeros((1, rows, 0), dtype=np.float32)
    q, scales = nearly(by, x)
    out = np.full((rows, len(weight)), np.nan, dtype=np.float32)
    floors, best = np.full((2, threads, rows), np.nan, dtype=np.float32)
    which = np.full((threads, rows), -7, dtype=np.int64)
    near = PreparedRows(q[None], scales[None], none)
    exact = PreparedRows(wide(x, packed.padded)[None], np.zeros((1, rows), np.float32), none)
    TEAMS[threads].run(screened, by, head, near, 0, exact, 0, x, out, floors, best, which)
    return out, which[best.argmax(0), np.arange(rows)]


def numbers(seed: int, n: int, k: int, r: int, alike: float) -> tuple[Floats, Floats]:
    """Weights that are nearly the same where `alike` is small, so that eight bits cannot tell which is the largest."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=k) + alike * rng.normal(size=(n, k))
    return weight.astype(np.float32), (rng.normal(size=(r, k)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)


@given(shapes, seeds, st.sampled_from([1.0, 1e-2, 1e-4, 0.0]), st.sampled_from(list(TEAMS)))
@settings(deadline=None, max_examples=120)
def test_the_largest_product_has_its_bits_and_its_place(
    shape: tuple[int, int, int], seed: int, alike: float, threads: int
) -> None:
    weight, x = numbers(seed, *shape, alike)
    full, (out, which) = exactly(weight, x), largest(weight, x, threads)
    rows = np.arange(len(x))
    assert (which == full.argmax(1)).all() and (out.argmax(1) == which).all()  # the first of equals
    assert (out[rows, which] == full[rows, which]).all()


@given(shapes, seeds, st.sampled_from([1.0, 1e-3]))
@settings(deadline=None, max_examples=60)
def test_no_product_is_further_off_than_its_margin(shape: tuple[int, int, int], seed: int, alike: float) -> None:
    weight, x = numbers(seed, *shape, alike)
    made = screen_of(weight)
    q, scales = nearly(made, x)
    near = np.empty((len(x), len(weight)), dtype=np.float32)
    rows = PreparedRows(q[None], scales[None], np.zeros((1, len(x), 0), np.float32))
    screen.product(made.linear, 0, rows, 0, len(x), near, 0, len(weight))
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    length = np.linalg.norm(x.astype(np.float64), axis=1)[:, None]
    for products in (near, exactly(weight, x)):
        assert (np.abs(products - exact) <= made.margins * length).all()


def test_few_products_are_taken_twice() -> None:
    weight, x = numbers(3, 20_000, 64, 4, 1.0)
    out, _ = largest(weight, x)
    assert (out == exactly(weight, x)).mean() < 0.01


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e38, 1e-30, 0.0])
def test_rows_of_which_nothing_can_be_said_are_taken_whole(odd: float) -> None:
    weight, x = numbers(5, 100, 40, 3, 1e-4)
    x[1] = odd if odd in (1e38, 1e-30, 0.0) else x[1]
    x[1, 7] = odd
    full, (out, which) = exactly(weight, x), largest(weight, x, 2)
    assert np.array_equal(out[1], full[1], equal_nan=True)
    assert which.tolist() == full.argmax(1).tolist()


def test_margins_that_are_too_small_are_caught() -> None:
    def wrong(seed: int, factor: float) -> Any:
        weight, x = numbers(seed, 200, 64, 4, 1e-2)
        made = screen_of(weight)
        which = largest(weight, x, by=made._replace(margins=made.margins * np.float32(factor)))[1]
        return (which != exactly(weight, x).argmax(1)).any()

    assert any(wrong(seed, 0.0) for seed in range(20)) and not any(wrong(seed, 1.0) for seed in range(20))
