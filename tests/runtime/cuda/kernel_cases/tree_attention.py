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
EXAMPLES = 6 if GPU else 12  # there every example is a kernel to compile


def words_of(sees: np.ndarray, words: int) -> np.ndarray:
    out = np.zeros((len(sees), words), dtype=np.uint64)
    for r, row in enumerate(sees):
        for j in np.nonzero(row)[0]:
            out[r, j // 64] |= np.uint64(1) << np.uint64(j % 64)
    return out.view(np.int64)


def problem(
    seed: int, batch: int, rows: int, heads: int, group: int, dim: int, capacity: int, dtype: torch.dtype, *,
    texts: float = 0.0, room: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Trees of up to `rows` nodes, of which some ran before, and stretches of text; ragged and with gaps between them,
    some of them empty. `room`: so many rows for each instead."""
    rng = np.random.default_rng(seed)
    wide = 2 if rows > 64 else 1
    facts: dict[str, list[Any]] = {name: [] for name in ("lengths", "nodes", "counts", "causal")}
    begins, positions, bits = [0], [], []
    for b in range(batch):
        text = bool(rng.random() < texts)
        count = int(rng.integers(1, (3 * rows if text else rows) + 1))
        parents = np.array([-1, *(i - 1 if text else int(rng.integers(0, i)) for i in range(1, count))])
        tree = fixed(np.zeros(count, dtype=np.int64), parents)
        done = min(int(rng.integers(0, 3)), count - 1)
        length = int(rng.integers(0, capacity - count))
        if b and batch > 2 and rng.random() < 0.2:  # an empty one: reads nothing
            length = count = done = 0
        taken = room if room is not None else count - done + int(rng.random() < 0.3) * int(rng.integers(0, 2 * rows))
        begins.append(begins[-1] + taken)
        for name, value in zip(facts, (length, count, count - done, int(text)), strict=True):
            facts[name].append(value)
        padding = (0, taken - (count - done))
        positions.append(np.pad((length + tree.depths)[done:count], padding, constant_values=length))
        seen = np.zeros((count - done, wide), np.int64) if text else words_of(tree.ancestor_mask()[done:count], wide)
        bits.append(np.pad(seen, (padding, (0, 0))))
    to = lambda x: torch.tensor(np.array(x), device=DEVICE)  # noqa: E731
    slots = to(rng.permutation(batch + 2)[:batch])
    lengths, nodes, counts, causal = (to(values) for values in facts.values())
    layout = reference.Layout(
        slots, lengths, nodes, to(begins), counts, causal, to(np.concatenate(positions)), to(np.concatenate(bits))
    )
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, dtype)  # noqa: E731
    query = normal(1, begins[-1], heads * group, dim).transpose(1, 2)
    keys, values = normal(batch + 2, heads, capacity, dim), normal(batch + 2, heads, capacity, dim)
    return query, keys, values, layout


def real_rows(layout: Any) -> list[slice]:
    return [slice(begin, begin + n) for begin, n in zip(layout.begins.tolist(), layout.counts.tolist(), strict=False)]


def still_to_store(keys: torch.Tensor, values: torch.Tensor, layout: Any) -> reference.Fresh:
    """Keys and values of the rows; what the cache holds where they are to stand, and behind, is taken out."""
    key, value = (torch.randn(1, part.shape[1], layout.rows, part.shape[3], device=DEVICE, dtype=part.dtype)
                  for part in (keys, values))  # fmt: skip
    for slot, length, nodes, count in zip(
        layout.slots.tolist(), layout.lengths.tolist(), layout.nodes.tolist(), layout.counts.tolist(), strict=True
    ):
        keys[slot, :, length + nodes - count : -1] = torch.nan
        values[slot, :, length + nodes - count : -1] = torch.nan
    return reference.Fresh(key, value)


def turned(layout: Any, dim: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(1, layout.rows, dim // 2, device=DEVICE).repeat(1, 1, 2) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


shapes = st.tuples(
    st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([1, 2, 5, 16]), st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 4]), st.sampled_from([8, 16, 24]), st.sampled_from([70, 200]),
)  # fmt: skip


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(shapes, st.sampled_from([None, 20, 90]), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 0.5]))
def test_the_kernel_equals_float64(
    shape: Any, window: int | None, cap: bool, sinks: bool, rotary: bool, texts: float
) -> None:
    query, keys, values, layout = problem(*shape, torch.float32, texts=texts)
    options: dict[str, Any] = {"window": window, "softcap": 3.0 if cap else None}
    if sinks:
        options["sinks"] = torch.randn(query.shape[1], device=DEVICE)
    if rotary:
        options["rotary"] = turned(layout, query.shape[3])
    want = reference.tree_attention(query, keys, values, layout, 0.3, **options)
    assert error(ta.tree_attention(query, keys, values, layout, 0.3, **options), want) < 1e-5


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(
    shapes, st.sampled_from([None, 20]), st.booleans(), st.sampled_from([None, (16, 1), (32, 3), (64, 7)]),
    st.sampled_from([0, 0.5, 1.0]),
)  # fmt: skip
def test_rows_that_are_not_in_the_cache_are_stored_and_seen(
    shape: Any, window: int | None, rotary: bool, cut: tuple[int, int] | None, texts: float
) -> None:
    query, keys, values, layout = problem(*shape, torch.float32, texts=texts)
    fresh = still_to_store(keys, values, layout)
    options: dict[str, Any] = {"window": window}
    if rotary:
        options["rotary"] = turned(layout, query.shape[3])
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
    for b, rows in enumerate(real_rows(layout)):
        one = slice(b, b + 1)
        single = reference.Layout(
            layout.slots[one], layout.lengths[one], layout.nodes[one], layout.begins[b : b + 2] - layout.begins[b],
            layout.counts[one], layout.causal[one], layout.positions[rows], layout.words[rows],
        )  # fmt: skip
        single.begins[1] = layout.counts[b]
        got = ta.tree_attention(query[:, :, rows], keys, values, single, 0.3, tiling=cut)
        assert torch.equal(got[0], whole[0, rows])


@pytest.mark.parametrize(("length", "cut"), [(0, None), (1, (16, 1)), (63, (32, 3)), (130, (64, 2))])
def test_a_stretch_of_text_between_trees_sees_what_stands_before_it(length: int, cut: tuple[int, int] | None) -> None:
    """Over several tiles of rows and blocks of keys, behind a prefix that ends anywhere in one."""
    query, keys, values, layout = problem(4, 3, 90, 1, 2, 16, 400, torch.float32, room=100)
    layout.lengths[1], layout.nodes[1], layout.counts[1], layout.causal[1] = length, 97, 90, 1
    layout.words[100:200] = 0
    fresh = still_to_store(keys, values, layout)
    want_key, want_value = (
        torch.cat([part[layout.slots[1], :, : length + 7], new[0, :, 100:190]], 1)
        for part, new in ((keys, fresh.key), (values, fresh.value))
    )
    got = ta.tree_attention(
        query, keys, values, layout, 0.3, fresh=fresh, tiling=cut and ta.AttentionTiling(*cut)
    )[0, 100:190]  # fmt: skip
    mask = torch.ones(90, length + 97, dtype=torch.bool, device=DEVICE).tril(length + 7)
    want = torch.nn.functional.scaled_dot_product_attention(
        query[0, :, 100:190], want_key.repeat_interleave(2, 0), want_value.repeat_interleave(2, 0), mask, scale=0.3
    )
    assert error(got, want.transpose(0, 1)) < 1e-5
    assert torch.equal(keys[layout.slots[1], :, : length + 97], want_key)


@pytest.mark.parametrize("stored", [True, False])
def test_padding_gives_zeros_and_sequences_without_rows_are_passed_over(stored: bool) -> None:
    query, keys, values, layout = problem(6, 4, 9, 2, 2, 16, 100, torch.float32, room=40)
    layout.lengths[2] = layout.nodes[2] = layout.counts[2] = 0
    layout.begins[3:] = layout.begins[3]
    layout.lengths[3] = layout.nodes[3] = layout.counts[3] = 0
    fresh = None if stored else still_to_store(keys, values, layout)
    before = keys.clone()
    got = ta.tree_attention(query, keys, values, layout, 0.3, fresh=fresh)[0, : int(layout.begins[-1])]
    assert got.isfinite().all()
    real = torch.zeros(len(got), dtype=torch.bool, device=DEVICE)
    for rows in real_rows(layout):
        real[rows] = True
    assert (got[~real] == 0).all() and (got[real] != 0).any(-1).any(-1).all()
    assert torch.equal(keys[layout.slots[2:]].nan_to_num(), before[layout.slots[2:]].nan_to_num())


def test_trees_of_more_than_one_word_of_nodes() -> None:
    query, keys, values, layout = problem(3, 2, 100, 1, 2, 16, 200, torch.float32)
    want = reference.tree_attention(query, keys, values, layout, 0.25)
    assert error(ta.tree_attention(query, keys, values, layout, 0.25), want) < 1e-5


@pytest.mark.parametrize("flag", [False, True])
def test_the_reference_is_torchs_own_attention_on_a_chain(flag: bool) -> None:
    """A chain behind a prefix is the causal mask, so the reference itself has a judge."""
    query, keys, values, layout = problem(0, 1, 6, 2, 1, 16, 40, torch.float64, room=6)
    layout.lengths[:], layout.nodes[:], layout.counts[:], layout.causal[:] = 20, 6, 6, int(flag)
    layout.words[:, 0] = 0 if flag else (2 ** torch.arange(1, 7)) - 1
    k, v = (part[layout.slots, :, :26] for part in (keys, values))
    mask = torch.ones(6, 26, dtype=torch.bool, device=DEVICE).tril(20)
    want = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)
    assert error(reference.tree_attention(query, keys, values, layout, 0.3), want) < 1e-12


@pytest.mark.parametrize("bug", ["sibling", "length", "slot", "position", "neighbour", "padding", "text"])
def test_a_planted_bug_is_caught(bug: str) -> None:
    """What the property tests would see if a sibling were visible, if a length, slot or position were wrong, if a row
    were its neighbour's, if a tile of padding were computed, or if text were taken for a tree."""
    query, keys, values, layout = problem(11, 2, 8, 2, 2, 16, 120, torch.float32, room=12)
    layout.causal[1] = 1
    want = reference.tree_attention(query, keys, values, layout, 0.3, window=30)
    if bug == "sibling":
        rows = real_rows(layout)[0]
        layout.words[rows] = (2 ** torch.arange(1, 1 + rows.stop, device=DEVICE))[:, None] - 1
    elif bug == "length":
        layout.lengths[0] += 1
    elif bug == "slot":
        layout.slots[:] = layout.slots.flip(0)
    elif bug == "position":
        layout.positions[:] += 3
    elif bug == "neighbour":
        layout.begins[1] -= 1
    elif bug == "padding":
        layout.counts[0] = 12
    else:
        layout.causal[:] = 0
    assert error(ta.tree_attention(query, keys, values, layout, 0.3, window=30), want) > 1e-3


def test_nothing_visible_gives_zeros_and_stale_cells_are_never_read() -> None:
    query, keys, values, layout = problem(5, 2, 4, 1, 2, 16, 100, torch.float32)
    first, second = real_rows(layout)
    layout.lengths[1], layout.words[second] = 0, 0
    for i in range(2):
        end = int(layout.lengths[i] + layout.nodes[i])
        keys[layout.slots[i], :, end:] = torch.nan
        values[layout.slots[i], :, end:] = torch.nan
    got = ta.tree_attention(query, keys, values, layout, 0.3)[0]
    assert got[first].isfinite().all()
    assert (got[second] == 0).all()


@pytest.mark.skipif(not GPU, reason="needs CUDA")
@pytest.mark.parametrize("texts", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_bfloat16_on_the_gpu(rows: int, batch: int, texts: float) -> None:
    query, keys, values, layout = problem(7, batch, rows, 8, 4, 128, 3000, torch.bfloat16, texts=texts)
    for window in (None, 600):
        want = reference.tree_attention(query, keys, values, layout, 128**-0.5, window=window)
        assert error(ta.tree_attention(query, keys, values, layout, 128**-0.5, window=window), want) < 1e-2
    fresh = still_to_store(keys, values, layout)
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
@pytest.mark.parametrize("texts", [0.0, 0.5])
def test_wide_trees_on_hopper(
    batch: int, rows: int, capacity: int, dim: int, patience: int, texts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without patience the last program joins all rows, with it each its share; large batches have nothing to join."""
    from outrider.runtime.cuda import hopper_attention

    monkeypatch.setattr(hopper_attention, "PATIENCE", patience)
    for seed, rotary in ((1, True), (2, False), (3, True)):
        room = None if texts and batch > 1 else rows
        query, keys, values, layout = problem(
            seed, batch, rows, 4, 4, dim, capacity, torch.bfloat16, texts=texts, room=room
        )
        assert room is None or hopper_attention.fits(query, keys, values, layout)
        options: dict[str, Any] = {"fresh": still_to_store(keys, values, layout)}
        if rotary:
            options["rotary"] = turned(layout, dim, torch.bfloat16)
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
