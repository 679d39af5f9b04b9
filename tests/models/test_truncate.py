"""First layers as a model: the same tensors, and exactly the original's early exit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models import LoadedModel, first_layers
from outrider.models.truncate import layer_list

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def llama(**more: object) -> PreTrainedModel:
    config = LlamaConfig(**SMALL, num_hidden_layers=4, num_key_value_heads=2, max_position_embeddings=64, **more)
    return LlamaForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=4, n_head=4, n_positions=64))


def gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **SMALL, num_hidden_layers=4, num_key_value_heads=2, head_dim=8, sliding_window=4, final_logit_softcapping=3.0,
        max_position_embeddings=64, layer_types=["full_attention", "sliding_attention"] * 2, initializer_range=0.5,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def opt() -> PreTrainedModel:
    config = OPTConfig(
        vocab_size=50, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    return OPTForCausalLM(config)


def dynamic_rope() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return llama(rope_parameters=rope)


EXITS = {  # final norm and head of each architecture, written out by hand
    "llama": (llama, lambda m, h: m.lm_head(m.model.norm(h))),
    "dynamic rope": (dynamic_rope, lambda m, h: m.lm_head(m.model.norm(h))),
    "gpt2": (gpt2, lambda m, h: m.lm_head(m.transformer.ln_f(h))),
    "gemma2": (gemma2, lambda m, h: 3.0 * torch.tanh(m.lm_head(m.model.norm(h)) / 3.0)),
    "opt": (opt, lambda m, h: m.lm_head(m.model.decoder.final_layer_norm(h))),
}


def after(model: PreTrainedModel, layers: int, ids: Tensor) -> Tensor:
    return model(ids, output_hidden_states=True).hidden_states[layers]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", EXITS)
@torch.no_grad()
def test_logits_are_the_early_exit_of_the_original(name: str, layers: int) -> None:
    torch.manual_seed(1)
    build, exit_head = EXITS[name]
    model = build().eval()
    ids = torch.randint(0, 50, (2, 12))
    short = first_layers(model, layers)
    assert short.config.get_text_config().num_hidden_layers == layers
    assert model.config.get_text_config().num_hidden_layers == 4, "the original's config is not touched"
    assert not short.training
    expected = exit_head(model, after(model, layers, ids))
    assert torch.equal(short(ids).logits, expected)
    assert not torch.allclose(expected, model(ids).logits, atol=1e-3), "the exit must differ from the full model"


@pytest.mark.parametrize("name", EXITS)
def test_every_tensor_is_the_original_s_own(name: str) -> None:
    model = EXITS[name][0]()
    short = first_layers(model, 2)
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    ours = dict([*short.named_parameters(remove_duplicate=False), *short.named_buffers(remove_duplicate=False)])
    assert len(ours) > 10
    for key, tensor in ours.items():
        assert tensor.data_ptr() == tensors[key].data_ptr(), key


@torch.no_grad()
def test_caches_of_the_two_do_not_meet(tiny_llama: LoadedModel) -> None:
    """The short model decodes with a cache of its own length, token by token as in one pass."""
    model, ids = tiny_llama.model, torch.arange(3, 11)[None]
    short = first_layers(model, 1)
    head = short(ids[:, :5], use_cache=True)
    tail = short(ids[:, 5:], past_key_values=head.past_key_values, use_cache=True)
    assert len(tail.past_key_values.layers) == 1
    torch.testing.assert_close(tail.logits, short(ids).logits[:, 5:], atol=1e-5, rtol=0)


@torch.no_grad()
def test_embedded_model_exits_early(smollm2: LoadedModel) -> None:
    model = smollm2.model
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer("A tree grows by the river.", return_tensors="pt").input_ids
    short = first_layers(model, 7)
    torch.testing.assert_close(short(ids).logits, model.lm_head(model.model.norm(after(model, 7, ids))))


@pytest.mark.parametrize("layers", [0, -1, 3])
def test_layer_count_out_of_range_is_named(tiny_llama: LoadedModel, layers: int) -> None:
    with pytest.raises(InputError, match="between 1 and 2"):
        first_layers(tiny_llama.model, layers)


def test_a_model_without_a_layer_list_is_refused() -> None:
    model = llama()
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(UnsupportedModel, match="cannot find the decoder layers of LlamaForCausalLM"):
        layer_list(model)


def test_replaced_modules_are_refused() -> None:
    class Packed(torch.nn.Linear):
        pass

    model = llama()
    model.model.layers[0].mlp.up_proj = Packed(32, 48)
    with pytest.raises(UnsupportedModel, match="Packed"):
        first_layers(model, 2)


def test_a_layer_that_depends_on_the_depth_is_refused() -> None:
    model = llama()
    model.model.layers[1].self_attn.layer_idx = 9
    with pytest.raises(UnsupportedModel, match="layer_idx"):
        first_layers(model, 2)
