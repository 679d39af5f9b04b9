"""A draft model is converted for OpenVINO once a process: not again for another method, but again for other weights."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")

from outrider.api import Outrider
from outrider.core.records import Needs
from outrider.core.tree import chain
from outrider.models.truncate import first_layers
from outrider.runtime import choice, conversions
from tests.runtime.running import run_trees


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def conversions_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    make = conversions._make
    monkeypatch.setattr(conversions, "_make", lambda model, precision: made.append(model) or make(model, precision))
    return made


def logits(target: Any) -> torch.Tensor:
    slot = target.acquire()
    scores = run_trees(target, [slot], [chain(3, [5, 7, 4])], Needs())[0].logits
    target.release(slot)
    return scores.clone()


def test_a_second_method_finds_the_graph_of_its_draft(tiny_llama, conversions_made: list[Any]) -> None:
    with Outrider(tiny_llama, "plain", limits={"max_slots": 1}, strict=True, runtime="openvino") as engine:
        conversions_made.clear()  # the target's own
        for name, width in (("draft-model", 16), ("dyspec", 16), ("draft-model", 9)):
            recipe = engine.recipe(name, {"layers": 1, "width": width})
            assert recipe.drafter.source.target.traits.runtime == "openvino"
        assert len(conversions_made) == 1


def test_weights_that_change_in_place_are_converted_again(tiny_llama, conversions_made: list[Any]) -> None:
    draft = first_layers(tiny_llama.model, 1)
    weight = next(found for name, found in draft.named_parameters() if "o_proj" in name)

    def build(runtime: str) -> Any:
        return choice.build(draft, runtime, keep=False, max_slots=1, max_context=64)

    before = weight.detach().clone()
    try:
        first = logits(build("openvino"))
        assert logits(build("openvino")).equal(first) and len(conversions_made) == 1
        weight.data.mul_(-3.0)  # as a learner does, which no version counter sees
        learnt = logits(build("openvino"))
        assert len(conversions_made) == 2 and not torch.allclose(learnt, first, atol=1e-3)
        torch.testing.assert_close(learnt, logits(build("eager")), atol=1e-4, rtol=1e-4)
    finally:
        weight.data.copy_(before)


def test_a_graph_goes_with_its_model(tiny_llama) -> None:
    draft = first_layers(tiny_llama.model, 1)
    choice.build(draft, "openvino", keep=False, max_slots=1, max_context=64)
    assert draft in choice._made
    count = len(choice._made)
    del draft
    gc.collect()
    assert len(choice._made) < count
