"""The trial that decides whether rows have the same bits: what it finds, what it remembers, and who is told."""

from __future__ import annotations

import itertools
import json
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.models.doctor import tried_bits
from outrider.runtime.cuda.same_bits import choice
from outrider.runtime.flight import Block
from outrider.runtime.native.backend import NativeBackend
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target, native_target
from tests.runtime.test_steps import small

GPU = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not GPU, reason="needs CUDA")
limits: dict[str, Any] = {"max_slots": 3, "max_rows": 24}


@pytest.fixture(scope="module")
def kept() -> SlotTarget:
    return native_target(small(), **limits)


def test_rows_in_one_order_pass_and_others_do_not(kept: SlotTarget) -> None:
    assert [choice.largest_difference(kept, seed) for seed in range(3)] == [0.0] * 3
    assert choice.largest_difference(eager_target(small(), **limits)) > 0


def test_one_slot_is_enough_for_the_trial() -> None:
    assert choice.largest_difference(native_target(small(), max_slots=1, max_rows=4)) == 0.0


def test_a_tree_of_the_trial_has_the_path_and_siblings_between() -> None:
    path = [3, 1, 4, 1, 5]
    tree, where = choice._around(path, np.random.default_rng(1), 24)
    assert tree.tokens[where].tolist() == path and tree.path(where[-1]) == where[1:]
    assert any(b - a > 1 for a, b in itertools.pairwise(where))


@pytest.mark.parametrize("when", ["other trees", "pieces of a prompt", "neighbours"])
def test_a_bit_that_moves_is_found(kept: SlotTarget, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = NativeBackend.run

    def moved(backend: Any, blocks: list[Block], needs: Any) -> Any:
        scores = run(backend, blocks, needs)
        hit = {"other trees": not blocks[0].text, "pieces of a prompt": blocks[0].length in range(1, 30),
               "neighbours": len(blocks) > 1}[when]  # fmt: skip
        for one in scores if hit and blocks[0].rows > 1 else ():
            one.logits[-1] = torch.nextafter(one.logits[-1], torch.tensor(9e9))
        return scores

    monkeypatch.setattr(NativeBackend, "run", moved)
    assert max(choice.largest_difference(kept, seed) for seed in range(3)) > 0


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(choice, "version", lambda name: "1")
    return []


def test_the_verdict_is_remembered_and_the_doctor_says_it(
    kept: SlotTarget, tried: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops = SimpleNamespace(missed=set())
    difference = partial(lambda worst, target: tried.append(worst) or worst)
    monkeypatch.setattr(choice, "largest_difference", partial(difference, 1e-3))
    with caplog.at_level(logging.WARNING, "outrider"):
        assert not choice.has_same_bits(ops, small(), kept)
    assert "near ties" in caplog.text
    monkeypatch.setattr(choice, "largest_difference", partial(difference, 0.0))
    assert not choice.has_same_bits(ops, small(), kept) and tried == [1e-3]
    assert choice.has_same_bits(ops, small(hidden_size=48), kept) and tried == [1e-3, 0.0]
    assert sorted(tried_bits()) == [
        ("LlamaForCausalLM", "not the same in other passes: see near ties, on a card"),
        ("LlamaForCausalLM", "the same in any pass, on a card"),
    ]
    path = choice._path(small(), kept)
    path.write_text(json.dumps([]))
    assert choice.has_same_bits(ops, small(), kept) and len(tried) == 3  # what cannot be read is tried again


def test_where_a_kernel_is_lacking_nothing_is_promised(kept: SlotTarget, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider"):
        assert not choice.has_same_bits(SimpleNamespace(), small(), kept)
        assert not choice.has_same_bits(SimpleNamespace(missed={"products of 100 inputs"}), small(), kept)
    assert "no kernel of one order for products of 100 inputs" in caplog.text


@needs_cuda
@pytest.mark.skipif(GPU and torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of Hopper's generation")
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_small_models_keep_the_bits_of_their_rows(kind: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
             "head_dim": 64, "max_position_embeddings": 2048}  # fmt: skip
    extra = {"sliding_window": 100} if kind == "Mistral" else {}
    model = small(kind, **sizes, **extra).to("cuda", torch.bfloat16)
    target = cuda_target(model, warm_up=False, max_slots=3, max_context=500, max_rows=64)
    assert target.traits.same_bits
    assert [choice.largest_difference(target, seed) for seed in range(1, 4)] == [0.0] * 3
    free = cuda_target(model, warm_up=False, bits="any", max_slots=3, max_context=500, max_rows=64)
    assert not free.traits.same_bits and choice.largest_difference(free) > 0
