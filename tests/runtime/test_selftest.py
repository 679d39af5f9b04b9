"""The check at load meets what begins late in a text, in batches of unequal length, and leaves the model as it was."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from outrider.core.errors import UnsupportedModel
from outrider.runtime.eager import adapter
from outrider.runtime.eager import backend as eager
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.passes import Pass
from outrider.runtime.targets import eager_target, native_target
from outrider.runtime.thresholds import moved_near

CONTEXT, LATE = 20_000, 9_000  # tokens: far beyond what the check runs
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4,
    "original_max_position_embeddings": LATE,
}  # fmt: skip
SCALED = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": LATE,
    "max_position_embeddings": CONTEXT, "llama_4_scaling_beta": 2.0,
}  # fmt: skip
LLAMA4 = {
    "intermediate_size_mlp": 40, "num_local_experts": 2, "num_experts_per_tok": 1, "no_rope_layers": [1, 0],
    "attn_temperature_tuning": True, "attn_scale": 2.0, "floor_scale": LATE, "attention_chunk_size": LATE,
}  # fmt: skip
# name -> class, what its configuration adds, what the check moves near
LATE_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("Mistral", {"sliding_window": LATE}, "sliding_window 9000"),
    "chunks": ("Llama4", {**LLAMA4, "attn_temperature_tuning": False}, "attention_chunk_size 9000"),
    "temperature": ("Llama4", LLAMA4, "floor_scale 9000"),
    "scaled queries": ("Ministral3", {"rope_parameters": SCALED}, "original_max_position_embeddings 9000"),
    "long rope": (
        "Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": LATE},
        "original_max_position_embeddings 9000",
    ),
    "dynamic rope": (
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}},
        "max_position_embeddings 20000",
    ),
}  # fmt: skip


def late(name: str) -> Any:
    kind, extra, _ = LATE_MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Llama4" else f"{kind}Config")(**{**SMALL, **extra})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def settings_of(model: Any) -> list[dict[str, Any]]:
    hidden = ("_parameters", "_buffers", "_modules", "config")
    modules = [{k: v for k, v in vars(m).items() if k not in hidden} for m in model.modules()]
    return [copy.deepcopy(model.config.to_dict()), *modules]


def check(model: Any) -> None:
    eager_target(model, max_slots=2, max_rows=16, self_test=True)


@pytest.mark.parametrize("name", LATE_MODELS)
def test_what_begins_late_is_met_and_put_back(name: str) -> None:
    model = late(name)
    before = settings_of(model)
    frequencies = [b.clone() for b in model.buffers()]
    check(model)
    with moved_near(model, CONTEXT) as moved:
        assert LATE_MODELS[name][2] in moved
    assert settings_of(model)[0] == before[0]
    assert all(
        now.get(key) == value
        for now, then in zip(settings_of(model)[1:], before[1:], strict=True)
        for key, value in then.items()
        if isinstance(value, int | float)
    )
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), frequencies, strict=True))


def without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pass, "restricted", lambda self, *_: self.mask)


def by_the_length_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "stand_ins", lambda _: [])


def by_the_first_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that a model may take for its scales, but not those of its text."""
    from transformers.models.ministral3 import modeling_ministral3 as module

    scale = module.get_llama_4_attn_scale
    monkeypatch.setattr(
        module, "get_llama_4_attn_scale", lambda positions, *rest: scale(positions[:1] * 0 + positions[:1], *rest)
    )


def no_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "context_limit", lambda _: (CONTEXT, ""))


PLANTED = {
    "window": without_windows, "chunks": without_windows, "temperature": by_the_length_of_the_cache,
    "scaled queries": by_the_first_position, "long rope": no_end_of_the_context,
    "dynamic rope": no_end_of_the_context,
}  # fmt: skip


@pytest.mark.parametrize("name", LATE_MODELS)
def test_a_late_mistake_is_found_only_because_the_threshold_is_moved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = late(name)
    PLANTED[name](monkeypatch)
    with pytest.raises(UnsupportedModel, match="differently from plain forwards .* reached"):
        check(model)
    monkeypatch.setattr(EagerBackend, "thresholds_near", lambda *_: nullcontext([]))
    check(model)


def test_a_switch_that_was_met_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = late("dynamic rope"), torch.arange(30)[None]
    with torch.no_grad():
        before = model(tokens).logits
        no_end_of_the_context(monkeypatch)
        with pytest.raises(UnsupportedModel):
            check(model)
        assert torch.equal(model(tokens).logits, before)


def test_compiled_code_that_knows_no_scaled_queries_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="original_max_position_embeddings 9000 reached.*use runtime eager"):
        native_target(late("scaled queries"), max_slots=2, max_rows=16)
    native_target(late("scaled queries"), max_slots=2, max_rows=16, max_context=LATE - 1)  # is not met


def test_compiled_windows_are_moved_with_the_models() -> None:
    native_target(late("window"), max_slots=2, max_rows=16)


@pytest.mark.parametrize(("context", "rows"), [(1, 1), (2, 16), (3, 2), (40, 3)])
def test_the_smallest_runtime_is_checked(context: int, rows: int) -> None:
    eager_target(late("window"), max_slots=1, max_context=context, max_rows=rows, self_test=True)
