"""What cannot be recorded, or not on this machine, is refused by name and with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.errors import InputError, UnsupportedModel
from outrider.runtime import choice
from outrider.runtime.cuda import backend as graphed
from tests.runtime.cuda.test_backend import DEVICE, GPU, placed, runtime
from tests.runtime.test_steps import small


def test_attention_of_a_models_own_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedModel, match="use the runtime eager"):
        runtime(placed("falcon-alibi"), max_slots=1)


@pytest.mark.parametrize(
    ("name", "what"), [("llama4", "attention temperature tuning"), ("bart", "a table of positions")]
)
def test_positions_from_storage_order_are_refused_by_name(name: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"storage order \({what}.*use the runtime eager"):
        runtime(placed(name), max_slots=1)


def test_a_cache_of_compressed_keys_is_refused_by_name_and_found_by_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    model = small("MiniCPM3", **latent, num_key_value_heads=4).to(DEVICE)
    with pytest.raises(UnsupportedModel, match="MiniCPM3ForCausalLM .* what they are made of.*use the runtime eager"):
        runtime(model, max_slots=1)

    class Anything(set[int]):
        __ge__ = lambda *_: True  # noqa: E731

    made = graphed.Step.__init__

    def unchecked(step: graphed.Step, *args: Any) -> None:
        made(step, *args)
        step.stored = Anything()

    monkeypatch.setattr(graphed.Step, "__init__", unchecked)
    with pytest.raises(UnsupportedModel, match="differently as a graph"):
        runtime(model, max_slots=1, capture=False)


@pytest.mark.skipif(GPU, reason="needs a machine without CUDA")
def test_no_cuda_is_told_by_name_and_passed_over_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="device cuda"):
        choice.build(small(), "graphs", max_slots=1)
    assert choice.build(small(), max_slots=1).traits.runtime == "eager"
    assert not caplog.records


def test_no_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install triton"):
        graphed.kernels()
