"""A model that is tuned while a target holds it: the target runs the new weights, and nothing of the old ones is left.

Every runtime is tried, in every form in which it copies weights; the same test sees a runtime that copies nothing anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider.core.errors import InputError, OutriderError
from outrider.core.protocols import Refreshes
from outrider.core.records import NO_NEEDS, Needs, Piece
from outrider.core.tree import chain
from outrider.models import first_layers, load_model
from outrider.runtime.conversions import openvino_graph
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import cuda_target, eager_target, native_target, openvino_target

TEXT, PATH = [5, 9, 30, 2, 41, 7, 7, 12], [3, 11]
LIMITS = {"max_slots": 2, "max_context": 128, "max_rows": 8}
ROUNDED, ALL_ROUNDED = 0.05, 0.1  # of the largest logit: int8 weights; and activations


def small() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def _openvino(model: Any, precision: str) -> SlotTarget:
    pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")
    return openvino_target(model, openvino_graph(model, precision, keep=False), precision=precision, **LIMITS)


def _graphs(model: Any, **options: Any) -> SlotTarget:
    if torch.cuda.is_available():
        return cuda_target(model.to("cuda"), **options, **LIMITS)
    return cuda_target(model, capture=False, **options, **LIMITS)


MADE: dict[str, tuple[Callable[[Any], SlotTarget], float]] = {
    "eager": (lambda model: eager_target(model, **LIMITS), 1e-4),
    "native float32": (lambda model: native_target(model, **LIMITS), 1e-4),
    "native int8": (lambda model: native_target(model, precision="int8", **LIMITS), ROUNDED),
    "openvino float32": (lambda model: _openvino(model, "float32"), 1e-3),
    "openvino int8": (lambda model: _openvino(model, "int8"), ALL_ROUNDED),
    "graphs": (_graphs, 1e-4),
    "graphs, fused": (lambda model: _graphs(model, fuse=True, warm_up=True), 1e-4),
}


def tune(model: Any) -> None:
    """As an optimizer does: in place, every weight."""
    noise = torch.Generator(model.device).manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.0 + 0.5 * torch.rand(weight.shape, generator=noise, device=weight.device))


def said(target: SlotTarget) -> torch.Tensor:
    """Logits of the last token and of two candidates behind it; the text is found again where it ran before."""
    slot = target.acquire(TEXT)
    if rest := TEXT[target.length(slot) : -1]:
        target.run([Piece(slot, rest)], NO_NEEDS)
    (scores,) = target.run([Piece(slot, tree=chain(TEXT[-1], PATH))], Needs())
    target.commit([slot], [[]])
    target.release(slot)
    assert scores.logits is not None
    return scores.logits.float().cpu().clone()


def model_says(model: Any) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([TEXT + PATH], device=model.device)
        return model(ids).logits[0, len(TEXT) - 1 :].float().cpu()


def distance(target: SlotTarget, model: Any) -> float:
    expected = model_says(model)
    return float((said(target) - expected).abs().max() / expected.abs().max())


def slow_but(*quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in MADE]


@pytest.mark.parametrize("name", slow_but("eager", "native float32", "graphs"))
def test_a_tuned_model_is_run_and_nothing_stale_is_left(name: str) -> None:
    make, tolerance = MADE[name]
    model = small()
    target = make(model)
    assert isinstance(target, Refreshes)
    assert distance(target, model) <= tolerance
    tune(model)
    old = model_says(model)
    target.refresh(model)
    assert distance(target, model) <= tolerance
    slot = target.acquire(TEXT)
    assert target.length(slot) in (0, len(TEXT) - 1, len(TEXT))  # of the new text only, which ran just now
    target.release(slot)
    assert float((old - model_says(small())).abs().max() / old.abs().max()) > 0.2  # the tuning shows


@pytest.mark.parametrize(
    "name",
    ["native float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("native int8", "openvino float32"))],
)
def test_without_copying_anew_the_old_weights_would_run(name: str, monkeypatch) -> None:
    """The planted bug of the test above: a refresh that forgets the copies."""
    make, tolerance = MADE[name]
    model = small()
    target = make(model)
    monkeypatch.setattr(type(target.backend), "refresh", lambda self, model: None)
    tune(model)
    target.refresh(model)
    assert distance(target, model) > 2 * tolerance


def test_texts_of_the_old_weights_are_not_found(monkeypatch) -> None:
    model = small()
    target = native_target(model, **LIMITS)
    said(target)
    slot = target.acquire(TEXT)
    assert target.length(slot) > 0
    target.release(slot)
    target.refresh(model)
    slot = target.acquire(TEXT)
    assert target.length(slot) == 0
    target.release(slot)
    monkeypatch.setattr(type(target._texts), "forget", lambda self: None)
    said(target)
    tune(model)
    target.refresh(model)
    assert distance(target, model) > 1e-3  # the planted bug: keys and values of the old weights


def test_weights_change_between_texts_and_in_the_model_that_was_loaded() -> None:
    model = small()
    target = native_target(model, **LIMITS)
    with pytest.raises(InputError, match="only the model that was loaded"):
        target.refresh(small())
    slot = target.acquire(TEXT)
    with pytest.raises(OutriderError, match="1 slots are in use"):
        target.refresh(model)
    target.release(slot)
    target.refresh(model)


def test_an_engine_follows_with_its_drafts_made_of_the_models_layers() -> None:
    """The draft is half of the model itself: its copies are of the tuned weights, too."""
    loaded = load_model(small())
    with outrider.Outrider(loaded, "plain", runtime="native", strict=True) as engine:
        options = {"layers": 1, "controller": "fixed", "budget": 3}
        drafted = engine.recipe("draft-model", options)

        def text(recipe: Any) -> list[int]:
            return engine.engine.submit(TEXT, outrider.SamplingParams(max_new_tokens=12), recipe).result().token_ids

        before = text(drafted)
        assert before == text(engine.recipe("plain"))
        tune(loaded.model)
        engine.refresh()
        assert text(drafted) == text(engine.recipe("plain")) != before
        ((draft, model),) = engine._draft_targets
        assert isinstance(draft, SlotTarget) and distance(draft, model) <= 1e-4
        assert np.isfinite(distance(draft, first_layers(loaded.model, 1)))
