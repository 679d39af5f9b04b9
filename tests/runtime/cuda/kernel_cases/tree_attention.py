"""The tree attention kernel against float64; `test_kernels.py` runs this file in a process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outrider.core.tree import fixed
from outrider.runtime.cuda import reference
from outrider.runtime.cuda import tree_attention as ta
from outrider.runtime.cuda.launch import hopper

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EXAMPLES = 6 if GPU else 25  # there every example is a kernel to compile


def words_of(sees: np.ndarray, rows: int, words: int) -> np.ndarray:
    out = np.zeros((rows, words), dtype=np.uint64)
    for r, row in enumerate(sees):
        for j in np.nonzero(row)[0]:
            out[r, j // 64] |= np.uint64(1) << np.uint64(j % 64)
    return out.view(np.int64)


def problem(
    seed: int, batch: int, rows: int, heads: int, group: int, dim: int, capacity: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    words = 2 if rows > 64 else 1
    lengths, nodes, positions, bits = [], [], [], []
    for _ in range(batch):
        count = int(rng.integers(1, rows + 1))
        parents = np.array([-1, *(int(rng.integers(0, i)) for i in range(1, count))])
        tree = fixed(np.zeros(count, dtype=np.int64), parents)
        length = int(rng.integers(0, capacity - count))
        lengths.append(length)
        nodes.append(count)
        positions.append(np.pad(length + tree.depths, (0, rows - count), constant_values=length))
        bits.append(words_of(tree.ancestor_mask(), rows, words))
    to = lambda x: torch.tensor(np.array(x), device=DEVICE)  # noqa: E731
    slots = to(rng.permutation(batch + 2)[:batch])
    layout = reference.Layout(slots, to(lengths), to(nodes), to(positions), to(bits))
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, dtype)  # noqa: E731
    query = normal(batch, rows, heads * group, dim).transpose(1, 2)
    keys, values = normal(batch + 2, heads, capacity, dim), normal(batch + 2, heads, capacity, dim)
    return query, keys, values, layout


def still_to_store(keys: torch.Tensor, values: torch.Tensor, layout: Any, rows: int) -> reference.Fresh:
    """The last nodes of every tree, one a row, and padding for the rest; what the cache holds there is taken out."""
    batch, capacity = len(layout.slots), keys.shape[2]
    key, value = (torch.randn(batch, part.shape[1], rows, part.shape[3], device=DEVICE, dtype=part.dtype)
                  for part in (keys, values))  # fmt: skip
    places = torch.full((batch, rows), capacity - 1, device=DEVICE)
    for b in range(batch):
        length, count = int(layout.lengths[b]), int(layout.nodes[b])
        fresh = max(1, min(rows, count) - b)  # the second sequence has run a node before
        places[b, :fresh] = torch.arange(length + count - fresh, length + count)
        keys[layout.slots[b], :, length + count - fresh : -1] = torch.nan
        values[layout.slots[b], :, length + count - fresh : -1] = torch.nan
    return reference.Fresh(key, value, places)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


shapes = st.tuples(
    st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([1, 2, 5, 16]), st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 4]), st.sampled_from([8, 16, 24]), st.sampled_from([70, 200]),
)  # fmt: skip


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(shapes, st.sampled_from([None, 20, 90]), st.booleans(), st.booleans(), st.booleans())
def test_the_kernel_equals_float64(shape: Any, window: int | None, cap: bool, sinks: bool, rotary: bool) -> None:
    query, keys, values, layout = problem(*shape, torch.float32)
    options: dict[str, Any] = {"window": window, "softcap": 3.0 if cap else None}
    if sinks:
        options["sinks"] = torch.randn(query.shape[1], device=DEVICE)
    if rotary:
        angle = torch.rand(query.shape[0], query.shape[2], query.shape[3] // 2, device=DEVICE).repeat(1, 1, 2) * 6
        options["rotary"] = (angle.cos(), angle.sin())
    want = reference.tree_attention(query, keys, values, layout, 0.3, **options)
    assert error(ta.tree_attention(query, keys, values, layout, 0.3, **options), want) < 1e-5


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(shapes, st.sampled_from([None, 20]), st.booleans(), st.sampled_from([None, (16, 1), (32, 3), (64, 7)]))
def test_rows_that_are_not_in_the_cache_are_stored_and_seen(
    shape: Any, window: int | None, rotary: bool, cut: tuple[int, int] | None
) -> None:
    query, keys, values, layout = problem(*shape, torch.float32)
    batch, _, rows, dim = query.shape
    fresh = still_to_store(keys, values, layout, rows)
    options: dict[str, Any] = {"window": window}
    if rotary:
        angle = torch.rand(batch, rows, dim // 2, device=DEVICE).repeat(1, 1, 2) * 6
        options["rotary"] = (angle.cos(), angle.sin())
    copies = keys.clone(), values.clone()
    got = ta.tree_attention(
        query, *copies, layout, 0.3, fresh=fresh, tiling=cut and ta.AttentionTiling(*cut), **options
    )
    for kept in (keys, values):
        kept.nan_to_num_(0.0)  # the judge multiplies what it does not see by zero
    want = reference.tree_attention(query, keys, values, layout, 0.3, fresh=fresh, **options)
    assert error(got, want) < 1e-5
    for mine, theirs in zip(copies, (keys, values), strict=True):
        assert torch.allclose(mine.nan_to_num(0.0)[:, :, :-1], theirs[:, :, :-1], atol=1e-5)


def test_a_row_is_the_same_beside_any_other_sequences() -> None:
    query, keys, values, layout = problem(2, 3, 5, 2, 2, 16, 200, torch.float32)
    cut = ta.AttentionTiling(16, 3)
    whole = ta.tree_attention(query, keys, values, layout, 0.3, tiling=cut)
    for b in range(3):
        single = reference.Layout(*(getattr(layout, f)[b : b + 1] for f in reference.Layout.__slots__))
        assert torch.equal(ta.tree_attention(query[b : b + 1], keys, values, single, 0.3, tiling=cut)[0], whole[b])


def test_trees_of_more_than_one_word_of_nodes() -> None:
    query, keys, values, layout = problem(3, 2, 100, 1, 2, 16, 200, torch.float32)
    want = reference.tree_attention(query, keys, values, layout, 0.25)
    assert error(ta.tree_attention(query, keys, values, layout, 0.25), want) < 1e-5


def test_the_reference_is_torchs_own_attention_on_a_chain() -> None:
    """A chain behind a prefix is the causal mask, so the reference itself has a judge."""
    query, keys, values, layout = problem(0, 1, 6, 2, 1, 16, 40, torch.float64)
    layout.lengths[:], layout.nodes[:] = 20, 6
    layout.words[0, :, 0] = (2 ** torch.arange(1, 7)) - 1
    k, v = (part[layout.slots, :, :26] for part in (keys, values))
    mask = torch.ones(6, 26, dtype=torch.bool, device=DEVICE).tril(20)
    want = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)
    assert error(reference.tree_attention(query, keys, values, layout, 0.3), want) < 1e-12


@pytest.mark.parametrize("bug", ["sibling", "length", "slot", "position"])
def test_a_planted_bug_is_caught(bug: str) -> None:
    """What the property test would see if a sibling were visible, or a length, slot or position were wrong."""
    query, keys, values, layout = problem(11, 2, 8, 2, 2, 16, 120, torch.float32)
    want = reference.tree_attention(query, keys, values, layout, 0.3, window=30)
    if bug == "sibling":
        layout.words[:] = (2 ** torch.arange(1, 9, device=DEVICE))[None, :, None] - 1
    elif bug == "length":
        layout.lengths[0] += 1
    elif bug == "slot":
        layout.slots[:] = layout.slots.flip(0)
    else:
        layout.positions[:] += 3
    assert error(ta.tree_attention(query, keys, values, layout, 0.3, window=30), want) > 1e-3


def test_nothing_visible_gives_zeros_and_stale_cells_are_never_read() -> None:
    query, keys, values, layout = problem(5, 2, 4, 1, 2, 16, 100, torch.float32)
    layout.lengths[1], layout.words[1] = 0, 0
    for i in range(2):
        end = int(layout.lengths[i] + layout.nodes[i])
        keys[layout.slots[i], :, end:] = torch.nan
        values[layout.slots[i], :, end:] = torch.nan
    got = ta.tree_attention(query, keys, values, layout, 0.3)
    assert got[0].isfinite().all()
    assert (got[1] == 0).all()


@pytest.mark.skipif(not GPU, reason="needs CUDA")
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("batch", [1, 5])
def test_bfloat16_on_the_gpu(rows: int, batch: int) -> None:
    query, keys, values, layout = problem(7, batch, rows, 8, 4, 128, 3000, torch.bfloat16)
    for window in (None, 600):
        want = reference.tree_attention(query, keys, values, layout, 128**-0.5, window=window)
        assert error(ta.tree_attention(query, keys, values, layout, 128**-0.5, window=window), want) < 1e-2
    fresh = still_to_store(keys, values, layout, rows)
    copies = keys.clone(), values.clone()
    want = reference.tree_attention(
        query, keys.nan_to_num_(0.0), values.nan_to_num_(0.0), layout, 128**-0.5, fresh=fresh
    )
    assert error(ta.tree_attention(query, *copies, layout, 128**-0.5, fresh=fresh), want) < 1e-2


@pytest.mark.skipif(not hopper(DEVICE), reason="needs a GPU of Hopper's generation")
@pytest.mark.parametrize("patience", [0, 64])
@pytest.mark.parametrize(
    ("batch", "rows", "capacity", "dim"),
    [
        (1, 16, 180, 128),
        (2, 50, 1500, 64),
        (1, 64, 1500, 128),
        (2, 64, 9000, 128),
        (30, 16, 300, 128),
        (40, 16, 300, 64),
    ],
)
def test_wide_trees_on_hopper(
    batch: int, rows: int, capacity: int, dim: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without patience the last program joins all rows, with it each its share; large batches have nothing to join."""
    from outrider.runtime.cuda import hopper_attention

    monkeypatch.setattr(hopper_attention, "PATIENCE", patience)
    for seed, rotary in ((1, True), (2, False), (3, True)):
        query, keys, values, layout = problem(seed, batch, rows, 4, 4, dim, capacity, torch.bfloat16)
        assert hopper_attention.fits(query, keys, values)
        options: dict[str, Any] = {"fresh": still_to_store(keys, values, layout, rows)}
        if rotary:
            angle = torch.rand(query.shape[0], rows, dim, device=DEVICE) * 6
            options["rotary"] = (angle.cos().bfloat16(), angle.sin().bfloat16())
        copies = keys.clone(), values.clone()
        got = ta.tree_attention(query, *copies, layout, dim**-0.5, **options)
        for _ in range(10):  # a race would move bits; what is stored again is the same
            assert torch.equal(ta.tree_attention(query, *copies, layout, dim**-0.5, **options), got)
        for kept in (keys, values):
            kept.nan_to_num_(0.0)
        want = reference.tree_attention(query, keys, values, layout, dim**-0.5, **options)
        assert error(got, want) < 1e-2
        for mine, theirs in zip(copies, (keys, values), strict=True):
            assert torch.allclose(mine.nan_to_num(0.0)[:, :, :-1], theirs[:, :, :-1], atol=5e-2)
