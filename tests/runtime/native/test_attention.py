"""Attention of many heads and rows together: what numpy says, and the bits of a head that is alone behind its text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.core.numeric.compiled import compiled
from outrider.core.numeric.numbers import exp, softmax
from outrider.runtime.native.kernels.attention import BLOCK, MAX_QUERIES, PAGE, attend

Floats = NDArray[np.float32]
LAYER, HEAD = 1, 1
MIXED = (2, 0, 3, 1)  # pages in the order of a text


def cache(keys: Floats, values: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """As a slot of several layers and heads has them, in any pages; beside and behind stands what must not count."""
    pages, dim = len(keys) // (PAGE * BLOCK) + 1, keys.shape[1]
    wide = np.full((2, pages * PAGE * BLOCK, dim), np.nan, dtype=np.float32)
    wide[:, : len(keys)] = keys, values
    held = np.full((2, len(MIXED), 2, 3, PAGE, BLOCK, dim), np.nan, dtype=np.float32)
    pages_of = np.array(MIXED[: pages + 1])
    held[:, pages_of[:pages], LAYER, HEAD] = wide.reshape(2, pages, PAGE, BLOCK, dim)
    return np.ascontiguousarray(held[0].swapaxes(4, 5)), held[1], pages_of


def found(
    heads: Floats, group: int, skipped: int, keys: Floats, values: Floats, sees: NDArray[np.bool_], window: int
) -> Floats:
    """By heads of the rows in flight, which are the last of the keys."""
    held, results = cache(keys, values), heads.copy()
    scores = np.full((MAX_QUERIES, len(MIXED) * PAGE * BLOCK + 16), np.nan, dtype=np.float32)
    attend(results, group, skipped, *held, LAYER, HEAD, len(keys) - sees.shape[1], sees, window, scores)
    return results


def alone(head: Floats, keys: Floats, values: Floats, window: int) -> Floats:
    """By one that sees all keys."""
    return found(head[None], 1, 0, keys, values, np.ones((1, 1), dtype=np.bool_), window)[0]


def ancestors(parents: list[int]) -> NDArray[np.bool_]:
    sees = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents[1:], 1):
        sees[node] |= sees[parent]
    return sees


@st.composite
def trees(draw: st.DrawFn) -> NDArray[np.bool_]:
    nodes = draw(st.integers(1, 12))
    return ancestors([-1, *(draw(st.integers(max(0, node - 4), node - 1)) for node in range(1, nodes))])


CHAIN, FORKED = ancestors(list(range(-1, 7))), ancestors([-1, 0, 0, 1, 2, 2, 4, 6])


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(0, 150), sees=trees(), first=st.integers(0, 7), group=st.integers(1, 4),
    skipped=st.integers(0, 3), missing=st.integers(0, 3), dim=st.sampled_from([8, 32, 64, 68, 96, 128]),
    window=st.sampled_from([0, 0, 1, 3, 40, 70]), seed=st.integers(0, 99),
)  # fmt: skip
@example(length=130, sees=FORKED, first=0, group=3, skipped=0, missing=0, dim=64, window=0, seed=0)
@example(length=130, sees=FORKED, first=2, group=3, skipped=1, missing=1, dim=68, window=67, seed=0)
@example(length=130, sees=CHAIN, first=0, group=3, skipped=2, missing=0, dim=64, window=2, seed=0)
@example(length=130, sees=CHAIN, first=0, group=3, skipped=0, missing=0, dim=64, window=70, seed=0)
@example(length=0, sees=CHAIN, first=0, group=1, skipped=0, missing=0, dim=64, window=0, seed=0)
def test_heads_of_several_rows_find_the_bits_of_each_alone_behind_its_own_text(
    length: int, sees: NDArray[np.bool_], first: int, group: int, skipped: int, missing: int, dim: int, window: int,
    seed: int,
) -> None:  # fmt: skip
    """Rows from `first` on, without the first heads of the first row and the last of the last."""
    rng, first = np.random.default_rng(seed), min(first, len(sees) - 1)
    skipped, seen = skipped % group, sees[first:]
    owners = (np.arange(min(MAX_QUERIES, len(seen) * group - skipped)) + skipped) // group
    owners = owners[: max(1, len(owners) - missing % group)]
    seen = seen[: owners[-1] + 1, : first + owners[-1] + 1]  # no row sees a later one
    keys, values = rng.standard_normal((2, length + seen.shape[1], dim), dtype=np.float32)
    heads = rng.standard_normal((len(owners), dim), dtype=np.float32)
    together = found(heads, group, skipped, keys, values, seen, window)
    for head, row, got in zip(heads, seen[owners], together, strict=True):
        path = [*range(length), *(length + np.flatnonzero(row))]
        assert np.array_equal(got, alone(head, keys[path], values[path], window))


@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize(("length", "dim"), [(1, 64), (64, 68), (200, 32), (129, 128)])
def test_a_head_finds_what_numpy_says(length: int, dim: int, window: int) -> None:
    rng = np.random.default_rng(length)
    keys, values = rng.standard_normal((2, length, dim), dtype=np.float32)
    head = rng.standard_normal(dim, dtype=np.float32) / np.float32(dim**0.5)
    scores = (keys.astype(np.float64) @ head)[-window:]
    weights = np.exp(scores - scores.max())
    want = weights @ values[-window:] / weights.sum()
    assert np.abs(alone(head, keys, values, window) - want).max() < 1e-6 * np.abs(values).max()


@compiled
def one_by_one(scores: Floats) -> None:
    for i in range(len(scores)):
        scores[i] = exp(scores[i])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 101])
def test_weights_are_of_eight_sums_and_have_the_bits_of_single_exponentials(count: int) -> None:
    scores = 30 * np.random.default_rng(count).standard_normal(count, dtype=np.float32)
    exps, whole = scores - scores.max(), count // 8 * 8
    one_by_one(exps)
    assert np.allclose(exps, np.exp(np.maximum(scores - scores.max(), -87)), rtol=3e-7)
    lanes = np.zeros(8, dtype=np.float32)
    for part in exps[:whole].reshape(-1, 8):
        lanes += part
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    total = lanes[0]
    for value in exps[whole:]:
        total += value
    softmax(scores)
    assert np.array_equal(scores, exps * (np.float32(1) / total))


def test_what_is_not_a_number_is_not_hidden() -> None:
    for place in (0, 5, 19):
        scores = np.zeros(20, dtype=np.float32)
        scores[place] = np.nan
        softmax(scores)
        assert np.isnan(scores).all()
