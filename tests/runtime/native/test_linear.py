"""Products of packed weights: what numpy says, and the same bits for a row whatever rows stand beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.runtime.native.kernels import linear
from outrider.runtime.native.kernels.linear import (
    GROUP,
    PIECE,
    Packed,
    group_sums,
    multiply,
    multiply_float,
    multiply_int4,
    pack,
    pack_int4,
    pack_int8,
    quantize,
    share,
    unpack,
    unpacked_rows,
)
from outrider.runtime.native.kernels.products import look_up, single

shapes = st.tuples(st.integers(1, 70), st.integers(1, 200), st.integers(1, 18))  # weights' rows, columns, rows
seeds = st.integers(0, 2**32 - 1)


def rounded(packed: Packed, x: NDArray[np.float32]) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    q = np.full((len(x), packed.padded), 3, dtype=np.int16)  # what was there before must not count
    scales = np.full(len(x), np.nan, dtype=np.float32)
    quantize(x, q, scales, 0, len(x))
    return q, scales


def product(packed: Packed, x: NDArray[np.float32], parts: int = 1) -> NDArray[np.float32]:
    """In so many shares."""
    out = np.full((len(x), packed.rows), np.nan, dtype=np.float32)
    if packed.bits == 32:
        wide = np.zeros((len(x), packed.padded), dtype=np.float32)
        wide[:, : x.shape[1]] = x
        for me in range(parts):
            multiply_float(packed.values, wide, out, *share(packed.rows, me, parts))
        return out
    q, scales = rounded(packed, x)
    sums = np.empty((len(x), packed.padded // GROUP), dtype=np.float32)
    group_sums(q, sums, 0, len(x))
    for me in range(parts):
        low, high = share(packed.rows, me, parts)
        if packed.bits == 8:
            multiply(packed.values, packed.scales, q, scales, out, low, high)
        else:
            multiply_int4(packed.values, packed.scales, q, sums, scales, out, low, high)
    return out


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@given(shapes, seeds)
@settings(deadline=None, max_examples=60)
def test_products_of_int8_are_those_of_its_values(shape: tuple[int, int, int], seed: int) -> None:
    n, k, r = shape
    rng = np.random.default_rng(seed)
    values, scales = rng.integers(-128, 128, (n, k), dtype=np.int8), rng.random(n, dtype=np.float32)
    x = normal(seed, r, k)
    packed = pack_int8(values, scales)
    q, qscales = rounded(packed, x)
    assert (np.abs(q[:, :k] * qscales[:, None] - x) <= qscales[:, None] * 0.51).all() and not q[:, k:].any()
    whole = q[:, :k].astype(np.int64) @ values.T.astype(np.int64)
    expected = whole.astype(np.float32) * (scales * qscales[:, None])
    assert np.array_equal(product(packed, x), expected)


@given(shapes, seeds)
@settings(deadline=None, max_examples=60)
def test_products_of_int4_are_those_of_its_values(shape: tuple[int, int, int], seed: int) -> None:
    n, groups, r = shape[0], 1 + shape[1] // GROUP, shape[2]
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 16, (n, groups * GROUP), dtype=np.uint8)
    scales, minimums = rng.random((n, groups)).astype(np.float16), rng.normal(size=(n, groups)).astype(np.float16)
    x = normal(seed, r, groups * GROUP)
    packed = pack_int4(values, scales.astype(np.float32), minimums.astype(np.float32))
    q, qscales = rounded(packed, x)
    wide = np.repeat(scales.astype(float), GROUP, 1) * values + np.repeat(minimums.astype(float), GROUP, 1)
    expected = (q.astype(float) * qscales[:, None]) @ wide.T
    size = (np.abs(q * qscales[:, None])) @ np.abs(wide).T
    assert (np.abs(product(packed, x) - expected) <= 1e-6 * size).all()


@given(shapes, seeds)
@settings(deadline=None, max_examples=60)
def test_products_of_float32_are_numpys(shape: tuple[int, int, int], seed: int) -> None:
    n, k, r = shape
    weight, x = normal(seed, n, k), normal(seed + 1, r, k)
    assert (np.abs(product(pack(weight, 32), x) - x @ weight.T) <= 1e-6 * (np.abs(x) @ np.abs(weight).T)).all()


@given(shapes, seeds, st.sampled_from([8, 4, 32]), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_a_row_has_the_same_bits_beside_any_rows_and_in_any_share(
    shape: tuple[int, int, int], seed: int, bits: int, parts: int
) -> None:
    n, k, r = shape
    packed, x = pack(normal(seed, n, k), bits), normal(seed + 1, r, k)
    together = product(packed, x, parts)
    for row in range(r):
        assert np.array_equal(product(packed, x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("bits", [8, 4, 32])
def test_packing_loses_no_more_than_its_bits(bits: int) -> None:
    weight, x = normal(0, 40, 576), normal(1, 5, 576)
    error = np.abs(product(pack(weight, bits), x) - x @ weight.T).mean() / np.abs(x @ weight.T).mean()
    assert error < {8: 0.01, 4: 0.1, 32: 1e-6}[bits]


def test_long_rows_of_the_largest_numbers_do_not_overflow() -> None:
    k = PIECE * GROUP * 2 + 40
    packed = pack_int8(np.full((3, k), -128, dtype=np.int8), np.ones(3, dtype=np.float32))
    x = np.full((2, k), 2.5, dtype=np.float32)
    assert np.allclose(product(packed, x), -128 * 2.5 * k, rtol=1e-3)


def test_rows_without_a_size_and_rows_that_are_not_numbers() -> None:
    packed = pack(normal(0, 6, 70), 8)
    x = np.stack([np.zeros(70), np.full(70, 1e-45), normal(1, 70), np.full(70, np.inf), np.full(70, np.nan)])
    out = product(packed, x.astype(np.float32))
    assert not out[:2].any() and np.isfinite(out[2]).all() and np.isnan(out[3:]).all()
    assert not product(pack(np.zeros((6, 70), dtype=np.float32), 8), x[2:3].astype(np.float32)).any()


@given(st.integers(1, 500), st.integers(1, 9))
def test_shares_are_whole_blocks_that_cover_all(size: int, count: int) -> None:
    shares = [share(size, me, count) for me in range(count)]
    assert shares[0][0] == 0 and shares[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(shares))
    assert all(low % linear.ROWS == 0 or low == size for low, _ in shares)


def test_processors_without_these_instructions_get_the_same_whole_numbers(tmp_path: Path) -> None:
    """Compiled for any processor of this kind, in a process of its own."""
    x = normal(1, 5, 100)
    code = f"""
import numpy as np
from tests.runtime.native.test_linear import normal, pack, product
np.savez({str(tmp_path / "out.npz")!r}, **{{str(bits): product(pack(normal(0, 10, 100), bits), normal(1, 5, 100))
                                          for bits in (8, 4, 32)}})
"""
    plain = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=plain)
    with np.load(tmp_path / "out.npz") as found:
        assert np.array_equal(found["8"], product(pack(normal(0, 10, 100), 8), x))
        for bits in (4, 32):
            assert np.allclose(found[str(bits)], product(pack(normal(0, 10, 100), bits), x), atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4, 32])
def test_rows_are_looked_up_as_they_stand_in_the_matrix(bits: int) -> None:
    weight = np.random.default_rng(5).normal(size=(23, 70)).astype(np.float32)
    packed, rows = pack(weight, bits), np.array([22, 0, 7, 7, 5])
    whole = unpack(packed.values, packed.scales)
    assert np.array_equal(unpacked_rows(packed.values, packed.scales, rows), whole[rows])
    if bits == 4:  # of such no embedding is made
        return
    for row in rows:
        out = np.full(70, np.nan, np.float32)
        look_up(single(packed), row, out)
        assert np.array_equal(out, whole[row, :70])
