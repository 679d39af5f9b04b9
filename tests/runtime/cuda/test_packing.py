"""Rows of many sequences one behind another: where they stand, and that any mix of them equals the eager runtime."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.records import NO_NEEDS, Needs, Piece
from outrider.core.tree import fixed, root
from outrider.runtime.cuda.packing import ROWS, SEQUENCES, pack, passes, smallest
from outrider.runtime.flight import Block, text_block, tree_block
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target
from tests.runtime.cuda.test_backend import DEVICE, RECORDED, needs_cuda, placed
from tests.runtime.test_architectures import CONTEXT, QUICK, VOCAB, random_tree
from tests.runtime.test_steps import small

runtime = partial(cuda_target, warm_up=False)


def block_of(slot: int, rows: int, text: bool) -> Block:
    tokens = np.arange(rows)
    return text_block(slot, 3, tokens) if text else tree_block(slot, 3, fixed(tokens, tokens - 1))


blocks_of = st.lists(st.tuples(st.integers(1, 128), st.booleans()), min_size=1, max_size=80)


@settings(deadline=None, derandomize=True)
@given(blocks_of, st.booleans())
def test_every_row_has_a_place_of_its_own_and_those_with_logits_are_last(
    sizes: list[tuple[int, bool]], wanted: bool
) -> None:
    needs = Needs(logits=wanted)
    blocks = [block_of(i, rows, text) for i, (rows, text) in enumerate(sizes)]
    parts = list(passes(blocks))
    assert [b for part in parts for b in part] == blocks
    for part in parts:
        least = smallest(part, needs)
        packed = pack(part, needs, replace(least, rows=larger(least.rows)))  # fewer rows with logits than rows
        scored = sum(b.rows for b in packed.blocks[packed.texts :])
        assert packed.where.max() < packed.bucket.rows and len(set(packed.where)) == len(packed.where)
        assert scored == 0 or packed.begins[packed.texts] >= packed.bucket.rows - least.scored
        packed = pack(part, needs, least)
        size, where = packed.bucket, packed.where
        assert sorted(b.slot for b in packed.blocks) == [b.slot for b in part]
        assert len(set(where)) == len(where) == sum(b.rows for b in part)
        assert where.min() >= 0 and where.max() < size.rows <= ROWS[-1]
        assert list(packed.begins) == sorted(packed.begins) and packed.begins[0] == (where.min() if where.min() else 0)
        assert len(part) <= size.sequences <= SEQUENCES[-1]
        first = size.rows - size.scored
        for i, (b, begin) in enumerate(zip(packed.blocks, packed.begins, strict=True)):
            assert b.scored(needs) == (i >= packed.texts)
            assert not b.scored(needs) or begin >= first
        if len(where) > 16:
            assert size.rows <= 1.5 * len(where)


def larger(rows: int) -> int:
    return next((size for size in ROWS if size > rows), rows)


def test_sixty_four_sequences_share_a_pass_and_one_more_does_not() -> None:
    blocks = [block_of(i, 16, False) for i in range(65)]
    assert [len(part) for part in passes(blocks)] == [64, 1]
    assert smallest(blocks[:64], NO_NEEDS).rows == 1024
    assert [len(part) for part in passes([block_of(0, 512, True), *blocks[:33]])] == [33, 1]


def mixed(model: Any, seed: int, steps: int, slots: int = 5) -> float:
    """Random passes of text and trees on the packed and on the eager runtime; the largest difference of what both give.

    A slot may have no part in a pass, text may be scored or not, and hidden states are asked for now and then.
    """
    rng = np.random.default_rng(seed)
    limits = {"max_slots": slots, "max_rows": 16}
    targets: list[SlotTarget] = [runtime(model, **limits), eager_target(model, **limits)]
    worst = 0.0
    for target in targets:
        assert [target.acquire() for _ in range(slots)] == list(range(slots))
    for _ in range(steps):
        needs = Needs(logits=bool(rng.random() < 0.3), hidden=(1,) if rng.random() < 0.3 else ())
        pieces = []
        for slot in rng.permutation(slots)[: rng.integers(1, slots + 1)].tolist():
            room = CONTEXT - targets[0].length(slot) - 1
            if room < 2:
                for target in targets:
                    target.truncate(slot, 0)
            elif rng.random() < 0.5:
                text = rng.integers(0, VOCAB, rng.integers(1, min(room, 20) + 1)).tolist()
                pieces.append(Piece(slot, text))
            else:
                pieces.append(Piece(slot, tree=random_tree(rng, 5, int(rng.integers(0, 16)), room)))
        if not pieces:
            continue
        for piece, mine, theirs in zip(pieces, *(target.run(pieces, needs) for target in targets), strict=True):
            assert (mine.logits is None) == (theirs.logits is None) == (piece.tree is None and not needs.logits)
            pairs = [(mine.hidden[layer], theirs.hidden[layer]) for layer in needs.hidden]
            if mine.logits is not None and theirs.logits is not None:
                pairs.append((mine.logits, theirs.logits))
                if mine.likeliest is not None:  # a tree deeper than a window runs eagerly
                    assert list(mine.likeliest) == mine.logits.argmax(-1).tolist()
            for a, b in pairs:
                assert a.shape == b.shape
                worst = max(worst, float((a - b).abs().max()))
        trees = {piece.slot: piece.tree for piece in pieces if piece.tree is not None}
        paths = [tree.path(int(rng.integers(0, len(tree)))) for tree in trees.values()]
        for target in targets:
            target.commit(list(trees), paths)
    return worst


@pytest.mark.parametrize("name", RECORDED)
@settings(QUICK, max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_any_mix_of_text_and_trees_equals_the_eager_runtime(name: str, seed: int) -> None:
    assert mixed(placed(name), seed, steps=8) < 1e-4


def test_logits_of_a_pass_are_parts_of_one_tensor() -> None:
    target = runtime(small().to(DEVICE), max_slots=3, max_rows=16)
    slots = [target.acquire() for _ in range(3)]
    pieces = [Piece(slots[0], tree=root(3)), Piece(slots[1], [4, 5, 6]), Piece(slots[2], tree=fixed(*TWO))]
    first, text, last = target.run(pieces, NO_NEEDS)
    assert text.logits is None and first.logits is not None and last.logits is not None
    assert first.logits.untyped_storage().data_ptr() == last.logits.untyped_storage().data_ptr()
    assert last.logits.data_ptr() == first.logits.data_ptr() + first.logits.nbytes


TWO = np.array([7, 8]), np.array([-1, 0])


def test_a_pass_larger_than_any_that_is_recorded_runs_in_several() -> None:
    """More rows, or more sequences; none of it eagerly."""
    model = small(max_position_embeddings=1100).to(DEVICE)
    target, eager = (make(model, max_slots=70, max_context=900, max_rows=16) for make in (runtime, eager_target))
    target.backend._eager.run = None  # type: ignore[attr-defined]
    pieces = [Piece(slot, list(range(20 + slot % 7))) for slot in range(70)]
    for made in (target, eager):
        assert [made.acquire() for _ in range(70)] == list(range(70))
    for more in (pieces, [Piece(slot, tree=root(slot % VOCAB)) for slot in range(70)]):
        for a, b in zip(target.run(more, Needs(logits=True)), eager.run(more, Needs(logits=True)), strict=True):
            assert torch.allclose(a.logits, b.logits, atol=1e-4)  # type: ignore[arg-type]


def test_what_is_met_again_is_recorded_then_and_not_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target = runtime(small().to(DEVICE), max_slots=2, max_rows=16)
    recorded: list[int] = []
    monkeypatch.setattr(target.backend.recordings, "_record", lambda step: recorded.append(step.bucket.rows))
    slot = target.acquire()
    for rows, expected in ((16, []), (12, [16]), (30, [16])):
        target.run([Piece(slot, list(range(rows)) if rows > 16 else [1] * rows)], NO_NEEDS)
        target.truncate(slot, 0)
        assert recorded == expected


@needs_cuda
def test_a_recording_gives_what_the_same_pass_gives_without_one() -> None:
    """Text beside trees, scored text, trees alone; the first run of a size is not recorded, the others are."""
    model = small(max_position_embeddings=400).to(DEVICE)
    target = runtime(model, max_slots=6, max_rows=40)
    slots = [target.acquire() for _ in range(6)]
    target.run([Piece(slot, [1, 2, 3 + slot]) for slot in slots], NO_NEEDS)
    rng = np.random.default_rng(0)
    trees = [Piece(slot, tree=random_tree(rng, 5, 10 * slot, 300)) for slot in slots[:4]]
    texts = [Piece(slot, rng.integers(0, VOCAB, 70).tolist()) for slot in slots[4:]]
    for pieces, needs in (([*trees, *texts], Needs(hidden=(1,))), (texts, Needs(logits=True)), (trees, Needs(top=4))):
        found = []
        for _ in range(4):
            found.append(target.run(pieces, needs))
            for slot in slots:
                target.truncate(slot, 3)
        for again in found[1:]:
            for a, b in zip(found[0], again, strict=True):
                if a.logits is not None and b.logits is not None:
                    torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)
                    assert a.likeliest == b.likeliest
                for layer, states in a.hidden.items():
                    torch.testing.assert_close(states, b.hidden[layer], atol=1e-5, rtol=1e-5)
    steps = target.backend.recordings.steps.values()  # type: ignore[attr-defined]
    assert all(step.graph for step in steps if step.uses > 1) and sum(step.graph for step in steps) >= 3
