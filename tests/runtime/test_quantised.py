"""Models that transformers has quantised: run where rows do not see each other, refused with a remedy elsewhere.

No kernel of a method runs here: what is looked at is what a configuration says, over a model of plain weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    FbgemmFp8Config,
    FineGrainedFP8Config,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
)

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models import load_model
from outrider.runtime import choice
from outrider.runtime.eager import backend as eager
from outrider.runtime.support import METHODS, refuse_unsupported
from outrider.runtime.targets import eager_target


def compressed(**inputs: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8}, "input_activations": inputs or None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


RUN = {
    "awq": AwqConfig(),
    "gptq": GPTQConfig(bits=4),
    "bitsandbytes 4 bits": BitsAndBytesConfig(load_in_4bit=True),
    "bitsandbytes 8 bits without outliers": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "fp8 by blocks": FineGrainedFP8Config(),
    "fp8 with fixed scales": FineGrainedFP8Config(weight_block_size=None, activation_scheme="static"),
    "fp8 made plain": FineGrainedFP8Config(weight_block_size=None, dequantize=True),
    "fbgemm fp8": FbgemmFp8Config(),
    "compressed weights": compressed(),
    "compressed by token": compressed(dynamic=True, strategy="token"),
    "compressed with fixed scales": compressed(dynamic=False, strategy="tensor"),
    "quanto weights": QuantoConfig(weights="int8"),
    "torchao weights": {"quant_method": "torchao", "quant_type": "Int4WeightOnlyConfig(group_size=128)"},
    "torchao by row": {"quant_method": "torchao", "quant_type": "Float8DynamicActivation(granularity=PerRow())"},
}
REFUSED = {
    "bitsandbytes 8 bits": (BitsAndBytesConfig(load_in_8bit=True), "outliers over all rows.*llm_int8_threshold=0"),
    "fp8 without blocks": (FineGrainedFP8Config(weight_block_size=None), "load it with dequantize=True"),
    "compressed by tensor": (compressed(dynamic=True, strategy="tensor"), "activations by token"),
    "quanto activations": (QuantoConfig(activations="int8"), "activations=None"),
    "torchao by tensor": (
        {"quant_method": "torchao", "quant_type": "Float8Dynamic(granularity=PerTensor())"},
        "PerRow",
    ),
    "unknown": ({"quant_method": "future"}, "how future treats the rows of a pass is not known; load the model's"),
    "unnamed": ({"bits": 3}, "an unnamed method"),
}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", RUN)
def test_a_method_that_keeps_rows_apart_is_run(name: str, model: Any) -> None:
    model.config.quantization_config = RUN[name]
    refuse_unsupported(model)


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_mixes_rows_is_refused_with_a_remedy(name: str, model: Any) -> None:
    model.config.quantization_config, said = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=rf"LlamaForCausalLM is quantised by .*: .*{said}.*awq, gptq") as refused:
        refuse_unsupported(model)
    assert "\n" not in str(refused.value)


def test_every_method_of_the_table_is_one_that_transformers_has() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    assert set(METHODS) - {"bitsandbytes"} <= set(AUTO_QUANTIZATION_CONFIG_MAPPING)


@pytest.mark.parametrize("runtime", ["native", "openvino"])
def test_a_runtime_that_reads_weights_itself_refuses_quantised_ones(runtime: str, model: Any) -> None:
    model.config.quantization_config = AwqConfig()
    with pytest.raises(
        UnsupportedModel, match="quantised by awq, whose weights the runtime .* does not read; use eager"
    ):
        choice.build(model, runtime, max_slots=1, keep=False)


def test_a_quantised_model_is_checked_when_it_is_loaded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(eager, "self_check", lambda backend, target: checked.append(target))
    eager_target(model, max_slots=1)
    assert not checked  # plain Llama is tested
    model.config.quantization_config = GPTQConfig(bits=4)
    eager_target(model, max_slots=1)
    assert len(checked) == 1


def test_a_model_that_cannot_be_moved_is_refused_in_one_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.quantization_method = SimpleNamespace(value="gptq")

    def to(*_: Any) -> None:
        raise ValueError("You cannot cast a GPTQ model in a new `dtype`.\nMore")

    monkeypatch.setattr(model, "to", to)
    with pytest.raises(InputError, match="cannot be moved to torch.bfloat16 .*; load it there with transformers"):
        load_model(model, dtype="bfloat16")
