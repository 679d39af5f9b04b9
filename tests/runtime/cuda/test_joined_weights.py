"""Joined weights: one piece of memory, the same values, and models that can still be saved and loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.runtime.cuda import fusion as graphed_fusion
from outrider.runtime.cuda import joined_weights, reference
from outrider.runtime.cuda.fusion import Fusion
from outrider.runtime.cuda.joined_weights import join


def projections(bias: bool, sizes: tuple[int, ...] = (12, 4, 4)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, size, bias=bias) for size in sizes]


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_gives_what_the_layers_give_and_they_share_its_memory(bias: bool) -> None:
    layers, x = projections(bias), torch.randn(5, 8)
    before = [layer(x) for layer in layers]
    joined = join(layers)
    assert joined is not None and (joined.bias is not None) == bias
    torch.testing.assert_close(linear(x, *joined), torch.cat(before, -1))
    for layer, want in zip(layers, before, strict=True):
        torch.testing.assert_close(layer(x), want)
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.untyped_storage().data_ptr() == joined.weight.untyped_storage().data_ptr()
    layers[1].weight.data.zero_()
    assert not linear(x, joined.weight)[:, 12:16].any()


def test_joining_again_finds_the_same_memory() -> None:
    layers = projections(True)
    first, second = join(layers), join(layers)
    assert first is not None and second is not None and first.bias is not None and second.bias is not None
    assert first.weight.data_ptr() == second.weight.data_ptr() and first.weight.shape == second.weight.shape
    assert first.bias.data_ptr() == second.bias.data_ptr() and len(second.bias) == 20


def test_a_layer_alone_large_ones_and_biases_of_some_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join(projections(False, (12,))) is None
    mixed = [*projections(True, (4,)), *projections(False, (4,))]
    assert join(mixed) is None and mixed[0].weight.data_ptr() != mixed[1].weight.data_ptr()
    monkeypatch.setattr(joined_weights, "SMALL", 4)
    assert join(projections(False)) is None


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def test_a_fused_model_has_queries_keys_and_values_as_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_llama(), torch.arange(6)[None]
    plain = model(ids).logits
    fusion = Fusion(model, reference, lambda: model(ids))
    products: list[int] = []

    def linear_seen(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        products.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(reference, "streams", lambda *_: False)
    monkeypatch.setattr(graphed_fusion, "F", SimpleNamespace(linear=linear_seen))
    with fusion.active():
        torch.testing.assert_close(graphed_fusion.real(model(ids).logits), plain)
    assert products == [48, 16, 24, 24, 16, 32]  # q, k and v; out; gate; up; down; the head


def test_a_model_whose_weights_were_joined_is_saved_and_loaded_as_before(tmp_path: Path) -> None:
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    assert join([attention.q_proj, attention.k_proj, attention.v_proj]) is not None
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(6)[None]
    torch.testing.assert_close(model(ids).logits, again(ids).logits)
