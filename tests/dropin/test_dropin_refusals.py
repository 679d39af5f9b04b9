"""What the transformers drop-in cannot honour is refused by name, with the model left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import SynthIDTextWatermarkingConfig

import outrider
from outrider.core.errors import InputError, UnknownName, UnsupportedModel
from tests.dropin.test_dropin import CONTEXT, VOCAB, prompt, speculate, tiny


class Counter(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Whim(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class OnceOnly(LogitsProcessor):
    seen: Any = frozenset()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[1] not in self.seen, "a text grows"
        self.seen = self.seen | {input_ids.shape[1]}
        return scores


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_beams=2", {"num_beams": 2}),
    ("num_beams=2", {"num_beams": 2, "do_sample": True}),
    ("penalty_alpha=0.6", {"penalty_alpha": 0.6, "top_k": 4}),
    ("dola_layers='low'", {"dola_layers": "low"}),
    ("prompt_lookup_num_tokens=3", {"prompt_lookup_num_tokens": 3}),
    ("assistant_early_exit=1", {"assistant_early_exit": 1}),
    ("use_mtp=True", {"use_mtp": True}),
    ("force_words_ids", {"force_words_ids": [[5]], "num_beams": 2}),
    ("assistant_model", {"assistant_model": tiny("llama")}),
    ("synced_gpus", {"synced_gpus": True}),
    ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
    ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ("past_key_values", {"past_key_values": DynamicCache()}),
    ("cache_implementation='offloaded'", {"cache_implementation": "offloaded"}),
    ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 9, 32)}),
    ("position_ids", {"position_ids": torch.arange(3, 12)[None]}),
    ("attention_mask", {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]])}),
    ("attention_mask", {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]])}),
    ("UnbatchedClassifierFreeGuidanceLogitsProcessor", {"guidance_scale": 1.5}),
    (
        "SynthIDTextWatermarkLogitsProcessor",
        {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3])},
    ),
    ("Counter.*'calls' changes", {"logits_processor": [Counter()]}),
    ("Whim.*answers differently", {"logits_processor": [Whim()]}),
    ("OnceOnly.*second call", {"logits_processor": [OnceOnly()]}),
    ("no option 'nonsense'", {"options": {"nonsense": 1}}),
    ("unknown method 'nonsense'", {"method": "nonsense"}),
    (f"context of {CONTEXT}", {"max_new_tokens": CONTEXT}),
    ("cache_bytes", {"cache_bytes": 1000}),
]  # fmt: skip


@pytest.mark.parametrize(("named", "asked"), REFUSED, ids=[f"{i}-{name[:24]}" for i, (name, _) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(named: str, asked: dict[str, Any]) -> None:
    if "offloaded" in str(asked.get("cache_implementation")) and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("transformers cannot make this cache with a CUDA build of torch and no CUDA")
    model = copy.deepcopy(tiny("llama"))
    before = model.generate(prompt(), max_new_tokens=8)
    with pytest.raises((InputError, UnknownName), match=named) as caught:
        model.generate(input_ids=prompt(), **{"max_new_tokens": 8, **asked}, custom_generate=outrider.generate)
    assert "\n" not in str(caught.value)
    assert torch.equal(model.generate(prompt(), max_new_tokens=8, custom_generate=speculate), before), "no harm done"


def test_a_foreign_model_input_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="token_type_ids"):
        tiny("gpt2").generate(prompt(), token_type_ids=torch.zeros_like(prompt()), custom_generate=outrider.generate)


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        T5ForConditionalGeneration(config).eval().generate(prompt(), custom_generate=outrider.generate)


def test_a_model_in_training_mode_is_refused_and_stays_in_it() -> None:
    model = copy.deepcopy(tiny("llama")).train()
    with pytest.raises(InputError, match="training mode"):
        model.generate(prompt(), custom_generate=outrider.generate)
    assert model.training


def test_a_call_past_generate_says_how_to_call() -> None:
    with pytest.raises(InputError, match="custom_generate"):
        outrider.generate(tiny("llama"), prompt())
