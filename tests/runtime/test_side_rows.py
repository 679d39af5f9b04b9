"""Side rows on every runtime that takes them: unseen by candidates, chains of their own, never kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.errors import InputError
from outrider.core.records import Needs, Piece, Scores
from outrider.core.rows.side import SideRows, chains
from outrider.core.tree import chain, fixed, root
from outrider.runtime import flight
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target, native_target
from tests.runtime.running import run_text

PROMPT = [3, 14, 15, 9, 26, 5, 35]
TREE = fixed(np.array([8, 9, 7, 9, 3]), np.array([-1, 0, 0, 1, 2]))
NEEDS = Needs(logits=True, hidden=(1, -1))
MAKERS: dict[str, Callable[..., SlotTarget]] = {
    "eager": eager_target, "native": native_target, "graphs": partial(cuda_target, warm_up=False),
}  # fmt: skip


@pytest.fixture(params=list(MAKERS))
def target(request: pytest.FixtureRequest, tiny_llama) -> SlotTarget:
    return MAKERS[request.param](tiny_llama.model, max_slots=4, max_rows=24)


@pytest.fixture(scope="module")
def words(tiny_llama) -> torch.Tensor:
    return tiny_llama.model.get_input_embeddings().weight.detach()


def opened(target: SlotTarget, prompt: list[int] = PROMPT) -> int:
    slot = target.acquire()
    run_text(target, [slot], [prompt])
    return slot


def scores(target: SlotTarget, slot: int, side: SideRows | None = None, **more: Any) -> Scores:
    return target.run([Piece(slot, tree=TREE, side=side, **more)], NEEDS)[0]


def same(target: SlotTarget, one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) if target.traits.same_bits else torch.allclose(one, other, atol=1e-5)


def test_candidates_score_the_same_with_and_without_side_rows(target: SlotTarget) -> None:
    """To the last bit where the runtime says so."""
    slot, vectors = opened(target), torch.randn(3, 32)
    plain = scores(target, slot)
    beside = scores(target, slot, chains([0, 2, 4], [3, 1, 2], vectors))
    assert plain.side is None and beside.side is not None and beside.side.logits is not None
    assert beside.logits is not None and plain.logits is not None
    assert same(target, plain.logits, beside.logits) and beside.logits.shape == plain.logits.shape
    for layer in NEEDS.hidden:
        assert same(target, plain.hidden[layer], beside.hidden[layer])
    assert len(beside.side.logits) == len(beside.side.hidden[-1]) == 6


def test_a_vector_that_is_a_tokens_embedding_scores_as_a_candidate_with_that_token(
    target: SlotTarget, words: torch.Tensor
) -> None:
    slot, tail = opened(target), [11, 12, 13]
    side = scores(target, slot, chains([0, 3], [3, 2], words[tail])).side
    for first, path in ((0, [8]), (3, [8, 9, 9])):
        tree = chain(path[0], [*path[1:], *tail])
        want = target.run([Piece(slot, tree=tree)], NEEDS)[0].logits[len(path) :]
        rows = side.logits[:3] if not first else side.logits[3:]
        assert same(target, rows, want[: len(rows)])


def test_rows_of_one_chain_do_not_see_another(target: SlotTarget) -> None:
    slot, vectors = opened(target), torch.randn(2, 32)
    alone = scores(target, slot, chains([2], [2], vectors)).side
    beside = scores(target, slot, chains([2, 0, 2], [2, 1, 1], vectors)).side
    assert same(target, alone.logits, beside.logits[:2])
    shared = chains([2, 2], [2, 2], vectors)
    mixed = scores(target, slot, replace(shared, sees=np.tri(4, dtype=bool))).side  # unless they say so
    assert not torch.allclose(alone.logits, mixed.logits[2:], atol=1e-3)


@pytest.mark.parametrize("path", [[], [2, 4], [1, 3]])
def test_nothing_of_a_side_row_stays(target: SlotTarget, path: list[int]) -> None:
    """Neither in the slot, nor in a text that begins alike later, nor in a fork."""
    clean, slot = opened(target), opened(target)
    side = chains(range(len(TREE)), [3, 2, 1, 2, 3], torch.randn(3, 32))
    for at, rows in ((clean, None), (slot, side)):
        scores(target, at, rows)
        target.commit([at], [path])
    assert target.length(slot) == target.length(clean) == len(PROMPT) + len(path)
    twin, next_step = target.fork(slot), fixed(np.array([1, 5, 6]), np.array([-1, 0, 0]))
    rows = [target.run([Piece(at, tree=next_step)], NEEDS)[0].logits for at in (clean, slot, twin)]
    assert same(target, rows[0], rows[1]) and same(target, rows[0], rows[2])
    text = [*PROMPT[:-1], *TREE.tokens[[0, *path]].tolist()]
    for at in (clean, slot, twin):
        target.release(at)
    again = target.acquire([*text, 1])
    if rest := text[target.length(again) :]:
        target.run([Piece(again, rest)], NEEDS)
    assert same(target, target.run([Piece(again, tree=next_step)], NEEDS)[0].logits, rows[0])


def test_rows_of_several_slots_and_text_share_a_pass(target: SlotTarget) -> None:
    """Only one of them has side rows, and a text runs with them."""
    first, second, third = opened(target), opened(target, [4, 4, 2]), target.acquire()
    vectors = torch.randn(2, 32)
    alone = [scores(target, first, chains([4], [2], vectors)), scores(target, second)]
    together = target.run(
        [Piece(second, tree=TREE), Piece(third, [1, 2, 3]), Piece(first, tree=TREE, side=chains([4], [2], vectors))],
        Needs(),
    )
    assert together[0].side is None and together[1].side is None
    assert same(target, together[0].logits, alone[1].logits) and same(target, together[2].logits, alone[0].logits)
    assert same(target, together[2].side.logits, alone[0].side.logits)


def test_a_chain_runs_row_by_row_as_at_once(target: SlotTarget) -> None:
    """A vector may depend on what the row before it said."""
    slot, vectors = opened(target), torch.randn(3, 32)
    at_once = target.run([Piece(slot, tree=root(8), side=chains([0], [3], vectors))], NEEDS)[0].side.logits
    target.run([Piece(slot, tree=root(8))], NEEDS)
    for count in (1, 2, 3):
        piece = Piece(slot, tree=root(8), side=chains([0], [count], vectors), done=count)
        found = target.run([piece], NEEDS)[0]
        assert len(found.logits) == 0 and same(target, found.side.logits, at_once[count - 1 : count])


def test_a_side_row_cannot_be_committed(target: SlotTarget) -> None:
    slot = opened(target)
    scores(target, slot, chains([0], [2], torch.randn(2, 32)))
    with pytest.raises(IndexError):
        target.commit([slot], [[len(TREE)]])


def test_rows_that_do_not_fit_and_runtimes_that_cannot_are_refused(target: SlotTarget) -> None:
    slot, vectors = opened(target), torch.randn(30, 32)
    with pytest.raises(InputError, match="passes max_rows"):
        scores(target, slot, chains([0], [30], vectors))
    target.traits = replace(target.traits, side_rows=False)
    with pytest.raises(InputError, match="does not run rows of a drafter's vectors for this model; use the runtime"):
        scores(target, slot, chains([0], [2], vectors))


def seen_by_candidates(*of: Any) -> flight.Block:
    block = _side_block(*of)
    block.sees[1:, -1] = True
    return block


def in_order_of_storage(*of: Any) -> flight.Block:
    block = _side_block(*of)
    return replace(block, depths=np.arange(len(block.depths)))


_side_block = flight.side_block


@pytest.mark.parametrize("bug", [seen_by_candidates, in_order_of_storage])
def test_planted_bugs_are_caught(
    target: SlotTarget, words: torch.Tensor, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runtime.slots.side_block", bug)
    with pytest.raises(AssertionError):
        test_candidates_score_the_same_with_and_without_side_rows(target)
        test_a_vector_that_is_a_tokens_embedding_scores_as_a_candidate_with_that_token(target, words)


@pytest.mark.slow
def test_the_embedded_model_scores_candidates_to_the_same_bit_beside_side_rows(smollm2) -> None:
    target = native_target(smollm2.model, max_slots=1, max_context=256, max_rows=32)
    slot = opened(target, list(range(40, 120)))
    plain = target.run([Piece(slot, tree=TREE)], Needs(hidden=(-1,)))[0]
    rows = chains(range(len(TREE)), [3, 1, 3, 2, 3], smollm2.model.get_input_embeddings().weight[[5, 6, 7]])
    beside = target.run([Piece(slot, tree=TREE, side=rows)], Needs(hidden=(-1,)))[0]
    assert torch.equal(plain.logits, beside.logits) and torch.equal(plain.hidden[-1], beside.hidden[-1])
    assert len(beside.side.logits) == 12
