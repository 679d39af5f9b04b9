"""What a text finds of its beginning, on every runtime that runs here: scores are as if it had all been run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.errors import CacheFull
from outrider.core.records import Needs, Piece
from outrider.core.tree import fixed, root
from outrider.runtime.blocks.paged import PagedSlots
from outrider.runtime.choice import build
from outrider.runtime.native.cache import SIZE, NativeCache
from outrider.runtime.slots import SlotTarget
from tests.runtime.running import run_text

TREE = fixed(np.array([8, 9, 7, 9, 3, 2, 3, 8]), np.array([-1, 0, 0, 1, 2, 2, 4, 6]))
PARTS = [np.random.default_rng(seed).integers(0, 61, length).tolist() for seed, length in enumerate((3, 90, 200, 290))]
RUNTIMES = ["native", "eager", *(["openvino"] if importlib.util.find_spec("openvino") else [])]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=RUNTIMES)
def target(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> Iterator[SlotTarget]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.runtime.slots.available", lambda: 64 << 20)  # so that texts are forgotten, too
        made = build(model, request.param, keep=False, max_slots=6)
    assert isinstance(made, SlotTarget)
    yield made


def finish(target: SlotTarget, slot: int, prompt: list[int]) -> torch.Tensor:
    """Runs what a slot lacks of a prompt, and scores a tree behind it."""
    rest = prompt[target.length(slot) :]
    run_text(target, [slot], [rest])
    logits = target.run([Piece(slot, tree=TREE)], Needs())[0].logits
    assert logits is not None
    return logits


def same(target: SlotTarget, one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) if target.traits.same_bits else bool((one - other).abs().max() < 1e-4)


def asked(target: SlotTarget, prompt: list[int], salt: str = "") -> tuple[int, torch.Tensor]:
    """A whole request: how much of its prompt was there, and the scores behind it."""
    slot = target.acquire(prompt[:-1], salt)
    known, logits = target.length(slot), finish(target, slot, prompt)
    target.commit([slot], [[2, 4]])
    target.release(slot)
    return known, logits


def from_scratch(target: SlotTarget, prompt: list[int]) -> torch.Tensor:
    slot = target.acquire()
    logits = finish(target, slot, prompt)
    target.release(slot)
    return logits


prompts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    waves=st.lists(st.lists(st.tuples(prompts, st.sampled_from(["", "a"])), min_size=1, max_size=3), max_size=4)
)  # fmt: skip
def test_scores_are_the_same_whatever_was_found(
    target: SlotTarget, waves: list[list[tuple[list[tuple[int, int]], str]]]
) -> None:
    """Several at once, which begin as each other or as what ran before."""
    for wave in waves:
        texts = [sum((PARTS[part][:length] for part, length in parts), [7])[:700] + [5] for parts, _ in wave]
        slots = [target.acquire(text[:-1], salt) for text, (_, salt) in zip(texts, wave, strict=True)]
        for slot, text in zip(slots, texts, strict=True):
            assert same(target, finish(target, slot, text), from_scratch(target, text))
        target.commit(slots, [[1, 3]] * len(slots))
        for slot in slots:
            target.release(slot)
    assert target.free_slots == 6


def test_a_conversation_goes_on_where_it_stopped(target: SlotTarget) -> None:
    prompt = [20, *PARTS[3], 5]
    known, _ = asked(target, prompt)
    assert known == 0
    after = [*prompt, *(int(TREE.tokens[node]) for node in (2, 4)), 11, 12, 13]  # the pending token stood last
    after[len(prompt) - 1] = int(TREE.tokens[0])
    known, logits = asked(target, after)
    assert known == len(prompt) + 2 and same(target, logits, from_scratch(target, after))


def test_other_callers_find_nothing(target: SlotTarget) -> None:
    prompt = [21, *PARTS[2]]
    assert asked(target, prompt, "one")[0] == 0
    assert asked(target, prompt, "other")[0] == 0
    assert asked(target, prompt)[0] == 0
    assert asked(target, prompt, "one")[0] == len(prompt) - 1


def test_a_twin_and_a_shorter_text_are_left_as_they_were(target: SlotTarget) -> None:
    prompt, other = [22, *PARTS[3], 4], [22, *PARTS[3][:200], 9, 9, 9]
    slot = target.acquire(prompt[:-1])
    want = finish(target, slot, prompt)
    twin = target.fork(slot, 150)
    target.truncate(slot, 201)
    assert same(target, finish(target, slot, other), from_scratch(target, other))
    assert same(target, finish(target, twin, prompt), want)
    third = target.acquire(prompt[:-1])
    assert target.length(third) == len(prompt) - 1 and same(target, finish(target, third, prompt), want)
    for each in (slot, twin, third):
        target.release(each)


def test_a_beginning_that_is_not_the_texts_is_noticed(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: one block of another text is read."""
    target = build(model, "native", max_slots=2, cache_bytes=64 << 20)
    assert isinstance(target, SlotTarget)
    for name in (23, 24):
        asked(target, [name, *PARTS[3]])
    found = PagedSlots._begin
    monkeypatch.setattr(PagedSlots, "_begin", lambda self, slot, text, blocks, tokens: found(
        self, slot, text, [(block + 1) % 4 for block in blocks], tokens))  # fmt: skip
    prompt = [23, *PARTS[3]]
    known, logits = asked(target, prompt)
    assert known == len(prompt) - 1 and not torch.equal(logits, from_scratch(target, prompt))


# The pool of the native runtime


def native(model: LlamaForCausalLM, texts: int, slots: int) -> SlotTarget:
    """With room for so many blocks."""
    made = build(model, "native", max_slots=slots, max_context=600, cache_bytes=texts * SIZE * 512)
    assert isinstance(made, SlotTarget) and made.backend.token_bytes == 512
    return made


def test_as_many_sequences_run_as_are_asked_for_where_their_texts_fit(model: LlamaForCausalLM) -> None:
    target = native(model, 66, 64)
    assert target.free_slots == 64 and target.max_context == 600
    slots = [target.acquire() for _ in range(64)]
    trees = [Piece(slot, tree=root(slot % 61)) for slot in slots]
    scores = target.run(trees, Needs())
    target.commit(slots, [[]] * 64)
    assert target.fits(dict.fromkeys(slots, SIZE - 1)) and not target.fits(dict.fromkeys(slots, SIZE))
    alone = native(model, 4, 1)
    for score, tree in zip(scores[:5], trees, strict=False):
        slot = alone.acquire()
        want = alone.run([Piece(slot, tree=tree.tree)], Needs())[0].logits
        assert score.logits is not None and want is not None and torch.equal(score.logits, want)
        alone.release(slot)


def test_a_pass_that_does_not_fit_is_refused_and_a_released_text_makes_room(model: LlamaForCausalLM) -> None:
    target = native(model, 4, 3)
    text = PARTS[3] + PARTS[3]
    slots = [target.acquire(text[n:]) for n in range(2)]
    target.run([Piece(slots[0], text[:500]), Piece(slots[1], text[1:500])], Needs())
    assert not target.fits({slots[0]: 20})
    with pytest.raises(CacheFull, match="raise cache_bytes"):
        target.run([Piece(slots[0], text[500:520])], Needs())
    assert target.length(slots[0]) == 500
    target.release(slots[1])
    assert target.fits({slots[0]: 20})
    want = from_scratch(native(model, 4, 1), text[:520])
    target.run([Piece(slots[0], text[500:519])], Needs())
    got = target.run([Piece(slots[0], tree=TREE)], Needs())[0].logits
    assert got is not None and torch.equal(got, want)


def test_memory_of_finished_texts_stays_within_its_bytes(model: LlamaForCausalLM) -> None:
    target = native(model, 6, 2)
    for name in range(12):
        asked(target, [name, *PARTS[3]])
    slots: PagedSlots = target._texts  # type: ignore[assignment]
    assert slots.pool.count == 6 and len(slots.prefixes) <= 6
    assert asked(target, [11, *PARTS[3]])[0] == 290 and asked(target, [0, *PARTS[3]])[0] == 0


def test_a_copy_takes_the_rows_of_every_layer(model: LlamaForCausalLM) -> None:
    backend: Any = native(model, 4, 2).backend
    cache: NativeCache = backend.cache
    for stored in cache.store[:2]:
        stored[2] = np.arange(stored[2].size, dtype=np.float32).reshape(stored[2].shape)
    cache.copy(2, 3, SIZE)
    assert all(np.array_equal(stored[2], stored[3]) for stored in cache.store[:2])
