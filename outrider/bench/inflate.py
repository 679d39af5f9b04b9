"""Inflate: a small Llama widened to the shape of a large one that says exactly the same, to measure real acceptance at
real cost without a large checkpoint.

The hidden size is padded with zeros and norms are scaled for it; new heads, the rest of the MLP and new layers write
nothing; the head size grows by placing rotary pair i at pair f * i and scaling queries by sqrt(f). Every weight that
the function leaves free is noise of the scale of its neighbours, because zeros flatter a GPU. Same logits to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InputError


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        return cls(
            config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.intermediate_size,
        )  # fmt: skip

    @property
    def group(self) -> int:
        return self.heads // self.key_heads


SHAPES = {
    "1b": Shape(2048, 32, 32, 8, 64, 8192),
    "8b": Shape(4096, 32, 32, 8, 128, 14336),
}  # the second is that of Llama 3 8B


def parse_shape(text: str, config: Any = None) -> Shape:
    """A name, or `hidden=1024,mlp=4096` on top of the model's own shape (or, without a model, of the largest)."""
    if text in SHAPES:
        return SHAPES[text]
    known = [part.name for part in fields(Shape)]
    try:
        given = {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(","))}
        return replace(Shape.of(config) if config is not None else SHAPES["8b"], **given)
    except (ValueError, TypeError):
        names = ", ".join(known)
        raise InputError(f"shape {text!r}: use {', '.join(SHAPES)}, or as in hidden=1024 with {names}") from None


def inflate(
    model: Any, shape: Shape = SHAPES["8b"], *, device: str | torch.device | None = None,
    dtype: torch.dtype | None = None, seed: int = 0,
) -> Any:  # fmt: skip
    """A new model of `shape` with the function of `model`; its output head is a matrix of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    old = _checked(model, shape)
    settings = model.config.to_dict() | {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads, "head_dim": shape.head_dim, "intermediate_size": shape.mlp,
        "rms_norm_eps": model.config.rms_norm_eps * old.hidden / shape.hidden, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.device(device or model.device):
        big = LlamaForCausalLM._from_config(LlamaConfig(**settings), dtype=dtype or model.dtype)
    big.generation_config = model.generation_config
    rng = torch.Generator(device=big.device).manual_seed(seed)
    with torch.no_grad():
        _fill(model, big, old, shape, rng)
    return big.eval().requires_grad_(False)


def _checked(model: Any, shape: Shape) -> Shape:
    config = model.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise InputError(f"only Llama models without biases can be inflated, not {config.model_type!r}")
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise InputError("a model with scaled rotary frequencies cannot be inflated: they change with the head size")
    old = Shape.of(config)
    for part in fields(Shape):
        if getattr(shape, part.name) < getattr(old, part.name):
            raise InputError(f"{part.name} {getattr(shape, part.name)} is below the model's {getattr(old, part.name)}")
    if shape.head_dim % old.head_dim or shape.heads % shape.key_heads or shape.group < old.group:
        raise InputError(
            f"head_dim must be a multiple of {old.head_dim}, heads one of key_heads, with {old.group} or more to a key"
        )
    if shape.hidden % shape.heads:
        raise InputError(f"hidden {shape.hidden} must be a multiple of heads {shape.heads}: transformers asks for it")
    return old


def _fill(model: Any, big: Any, old: Shape, new: Shape, rng: torch.Generator) -> None:
    device = big.device
    factor, half = new.head_dim // old.head_dim, old.head_dim // 2
    dims = torch.arange(half, device=device) * factor
    turned = torch.cat([dims, new.head_dim // 2 + dims])  # where the rotary pairs of an old head go
    plain = torch.arange(old.head_dim, device=device)
    heads = [(h // old.group) * new.group + h % old.group for h in range(old.heads)]
    queries, values = _rows(heads, turned, new), _rows(heads, plain, new)
    keys, key_values = _rows(range(old.key_heads), turned, new), _rows(range(old.key_heads), plain, new)
    every = _rows(heads, torch.arange(new.head_dim, device=device), new)
    hidden, mlp = torch.arange(old.hidden, device=device), torch.arange(old.mlp, device=device)
    scale = math.sqrt(old.hidden / new.hidden)

    def put(to: Tensor, source: Tensor, rows: Tensor, columns: Tensor, times: float = 1.0) -> None:
        value = (source.to(device=device, dtype=torch.float64) * times).to(to.dtype)
        to[rows[:, None], columns[None, :]] = value

    def noise(to: Tensor, source: Tensor) -> None:
        to.normal_(0.0, float(source.float().std()), generator=rng)

    def norm(to: Tensor, source: Tensor) -> None:
        to.fill_(float(source.float().mean()) * scale)
        to[: old.hidden] = (source.to(device=device, dtype=torch.float64) * scale).to(to.dtype)

    for i, layer in enumerate(big.model.layers):
        source = model.model.layers[min(i, old.layers - 1)]
        ours, theirs = layer.self_attn, source.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            noise(getattr(ours, name).weight, getattr(theirs, name).weight)
        for name in ("gate_proj", "up_proj"):
            noise(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight)
        ours.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        norm(layer.input_layernorm.weight, source.input_layernorm.weight)
        norm(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight)
        if i >= old.layers:
            continue  # a new layer writes nothing
        ours.q_proj.weight[every] = 0  # an old head must not see what its key has in the new dimensions
        put(ours.q_proj.weight, theirs.q_proj.weight, queries, hidden, math.sqrt(factor))
        put(ours.k_proj.weight, theirs.k_proj.weight, keys, hidden)
        put(ours.v_proj.weight, theirs.v_proj.weight, key_values, hidden)
        put(ours.o_proj.weight, theirs.o_proj.weight, hidden, values)
        put(layer.mlp.gate_proj.weight, source.mlp.gate_proj.weight, mlp, hidden)
        put(layer.mlp.up_proj.weight, source.mlp.up_proj.weight, mlp, hidden)
        put(layer.mlp.down_proj.weight, source.mlp.down_proj.weight, hidden, mlp)
    norm(big.model.norm.weight, model.model.norm.weight)
    words = torch.arange(model.config.vocab_size, device=device)
    big.model.embed_tokens.weight.zero_()
    put(big.model.embed_tokens.weight, model.get_input_embeddings().weight, words, hidden)
    noise(big.lm_head.weight, model.get_output_embeddings().weight)
    put(big.lm_head.weight, model.get_output_embeddings().weight, words, hidden)


def _rows(heads: Sequence[int] | range, dims: Tensor, shape: Shape) -> Tensor:
    return torch.cat([head * shape.head_dim + dims for head in heads])


@torch.inference_mode()
def difference(model: Any, big: Any, rows: int = 64, seed: int = 0) -> tuple[float, float]:
    """On random tokens: largest difference of logits over the largest logit, and share of rows with the same token."""
    tokens = torch.randint(0, model.config.vocab_size, (1, rows), generator=torch.Generator().manual_seed(seed))
    one, two = (m(tokens.to(m.device)).logits[0].double().cpu() for m in (model, big))
    return float((one - two).abs().max() / one.abs().max()), float((one.argmax(-1) == two.argmax(-1)).double().mean())
