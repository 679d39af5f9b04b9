"""Inflate: a small Llama widened to the shape of a large one that says exactly the same, to measure real acceptance at
real cost without a large checkpoint.

The hidden size is padded with zeros and norms are scaled for it; new heads, the rest of the MLP and new layers write
nothing; the head size grows by placing rotary pair i at pair f * i and scaling queries by sqrt(f). Every weight that
the function leaves free is noise of the scale of its neighbours, because zeros flatter a GPU. Same logits to rounding.
An EAGLE-3 drafter of the small model is widened by the same rules, and drafts for the large one what it did before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import InputError
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama: what a model is widened to."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        return cls(
            config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            config.intermediate_size,
        )  # fmt: skip

    @property
    def group(self) -> int:
        return self.heads // self.key_heads


SHAPES = {
    "1b": ModelShape(2048, 32, 32, 8, 64, 8192),
    "8b": ModelShape(4096, 32, 32, 8, 128, 14336),
}  # the second is that of Llama 3 8B


def parse_shape(text: str, config: Any = None) -> ModelShape:
    """A name, or `hidden=1024,mlp=4096` on top of the model's own shape (or, without a model, of the largest)."""
    if text in SHAPES:
        return SHAPES[text]
    known = [part.name for part in fields(ModelShape)]
    try:
        given = {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(","))}
        return replace(ModelShape.of(config) if config is not None else SHAPES["8b"], **given)
    except (ValueError, TypeError):
        names = ", ".join(known)
        raise InputError(f"shape {text!r}: use {', '.join(SHAPES)}, or as in hidden=1024 with {names}") from None


def inflate(
    model: Any, shape: ModelShape = SHAPES["8b"], *, device: str | torch.device | None = None,
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


def _checked(model: Any, shape: ModelShape) -> ModelShape:
    config = model.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise InputError(f"only Llama models without biases can be inflated, not {config.model_type!r}")
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise InputError("a model with scaled rotary frequencies cannot be inflated: they change with the head size")
    old = ModelShape.of(config)
    _check_sizes(old, shape)
    if shape.hidden % shape.heads:
        raise InputError(f"hidden {shape.hidden} must be a multiple of heads {shape.heads}: transformers asks for it")
    return old


def _check_sizes(old: ModelShape, shape: ModelShape) -> None:
    for part in fields(ModelShape):
        if getattr(shape, part.name) < getattr(old, part.name):
            raise InputError(f"{part.name} {getattr(shape, part.name)} is below the model's {getattr(old, part.name)}")
    if shape.head_dim % old.head_dim or shape.heads % shape.key_heads or shape.group < old.group:
        raise InputError(
            f"head_dim must be a multiple of {old.head_dim}, heads one of key_heads, with {old.group} or more to a key"
        )


class _Filling:
    """Where the numbers of an old layer stand in a new one, and how they get there."""

    def __init__(self, old: ModelShape, new: ModelShape, rng: torch.Generator) -> None:
        self.old, self.new, self.rng, self.device = old, new, rng, rng.device
        self.factor, half = new.head_dim // old.head_dim, old.head_dim // 2
        dims = torch.arange(half, device=self.device) * self.factor
        rotary = torch.cat([dims, new.head_dim // 2 + dims])  # where the rotary pairs of an old head go
        plain = torch.arange(old.head_dim, device=self.device)
        heads = [(h // old.group) * new.group + h % old.group for h in range(old.heads)]
        self.queries, self.values = _rows(heads, rotary, new), _rows(heads, plain, new)
        self.keys, self.key_values = (_rows(range(old.key_heads), part, new) for part in (rotary, plain))
        self.every = _rows(heads, torch.arange(new.head_dim, device=self.device), new)
        self.hidden, self.mlp = (torch.arange(size, device=self.device) for size in (old.hidden, old.mlp))
        self.scale = math.sqrt(old.hidden / new.hidden)

    def put(self, to: Tensor, source: Tensor, rows: Tensor, columns: Tensor, times: float = 1.0) -> None:
        value = (source.to(device=self.device, dtype=torch.float64) * times).to(to.dtype)
        to[rows[:, None], columns[None, :]] = value

    def noise(self, to: Tensor, source: Tensor) -> None:
        to.normal_(0.0, float(source.float().std()), generator=self.rng)

    def norm(self, to: Tensor, source: Tensor) -> None:
        to.fill_(float(source.float().mean()) * self.scale)
        to[: self.old.hidden] = (source.to(device=self.device, dtype=torch.float64) * self.scale).to(to.dtype)

    def layer(self, ours: Any, theirs: Any, inputs: Tensor | None = None, silent: bool = False) -> None:
        """Attention and MLP; `inputs` are the columns that the attention reads, `silent` writes nothing at all."""
        inputs = self.hidden if inputs is None else inputs
        pairs = [(getattr(ours.self_attn, n), getattr(theirs.self_attn, n)) for n in ("q_proj", "k_proj", "v_proj")]
        pairs += [(getattr(ours.mlp, n), getattr(theirs.mlp, n)) for n in ("gate_proj", "up_proj")]
        for wide, narrow in pairs:
            self.noise(wide.weight, narrow.weight)
        ours.self_attn.o_proj.weight.zero_()
        ours.mlp.down_proj.weight.zero_()
        if silent:
            return
        q = ours.self_attn.q_proj.weight
        q[self.every] = 0  # an old head must not see what its key has in the new dimensions
        self.put(q, theirs.self_attn.q_proj.weight, self.queries, inputs, math.sqrt(self.factor))
        self.put(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight, self.keys, inputs)
        self.put(ours.self_attn.v_proj.weight, theirs.self_attn.v_proj.weight, self.key_values, inputs)
        self.put(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight, self.hidden, self.values)
        self.put(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight, self.mlp, self.hidden)
        self.put(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight, self.mlp, self.hidden)
        self.put(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight, self.hidden, self.mlp)


def _fill(model: Any, big: Any, old: ModelShape, new: ModelShape, rng: torch.Generator) -> None:
    fill = _Filling(old, new, rng)
    for i, layer in enumerate(big.model.layers):
        source = model.model.layers[min(i, old.layers - 1)]
        fill.layer(layer, source, silent=i >= old.layers)
        fill.norm(layer.input_layernorm.weight, source.input_layernorm.weight)
        fill.norm(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight)
    fill.norm(big.model.norm.weight, model.model.norm.weight)
    words = torch.arange(model.config.vocab_size, device=fill.device)
    big.model.embed_tokens.weight.zero_()
    fill.put(big.model.embed_tokens.weight, model.get_input_embeddings().weight, words, fill.hidden)
    fill.noise(big.lm_head.weight, model.get_output_embeddings().weight)
    fill.put(big.lm_head.weight, model.get_output_embeddings().weight, words, fill.hidden)


@torch.no_grad()
def inflate_drafter(net: Eagle3Layer, shape: ModelShape = SHAPES["8b"], *, seed: int = 0) -> Eagle3Layer:
    """The drafter of the small model as one of the large: it reads the large one's features and embeddings, whose new
    dimensions are zero, and says what it said before. Its vocabulary stays; new weights write nothing."""
    was = net.shape
    old = ModelShape(was.hidden, 1, was.heads, was.kv_heads, was.head_dim, was.intermediate)
    new = replace(shape, layers=1, mlp=max(shape.mlp, was.intermediate))
    _check_sizes(old, new)
    wide = Eagle3Shape(
        new.hidden, new.heads, new.key_heads, new.head_dim, new.mlp, was.layers, was.vocab, was.theta,
        was.eps * old.hidden / new.hidden, was.rank, was.normed, was.scaling,
    )  # fmt: skip
    device, dtype = net.fc.weight.device, net.fc.weight.dtype
    with torch.device(device):
        big = Eagle3Layer(wide, net.ids).to(dtype)
    fill = _Filling(old, new, torch.Generator(device=device).manual_seed(seed))
    features = torch.cat([layer * new.hidden + fill.hidden for layer in range(len(was.layers))])
    fill.noise(big.fc.weight, net.fc.weight)
    big.fc.weight[:, features] = 0  # what is zero must stay zero
    fill.put(big.fc.weight, net.fc.weight, fill.hidden, features)
    fill.layer(big.midlayer, net.midlayer, torch.cat([fill.hidden, new.hidden + fill.hidden]))
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        fill.norm(big.get_parameter(f"{name}.weight"), net.get_parameter(f"{name}.weight"))
    ours, theirs = (each.lm_head[0] if was.rank else each.lm_head for each in (big, net))
    fill.noise(ours.weight, theirs.weight)
    fill.put(ours.weight, theirs.weight, torch.arange(len(theirs.weight), device=device), fill.hidden)
    if was.rank:
        big.lm_head[1].weight.copy_(net.lm_head[1].weight)
    return big.eval().requires_grad_(False)


def _rows(heads: Sequence[int] | range, dims: Tensor, shape: ModelShape) -> Tensor:
    return torch.cat([head * shape.head_dim + dims for head in heads])


@torch.inference_mode()
def difference(model: Any, big: Any, rows: int = 64, seed: int = 0) -> tuple[float, float]:
    """On random tokens: largest difference of logits over the largest logit, and share of rows with the same token."""
    tokens = torch.randint(0, model.config.vocab_size, (1, rows), generator=torch.Generator().manual_seed(seed))
    one, two = (m(tokens.to(m.device)).logits[0].double().cpu() for m in (model, big))
    return float((one - two).abs().max() / one.abs().max()), float((one.argmax(-1) == two.argmax(-1)).double().mean())
