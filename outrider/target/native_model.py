"""Which models the native step runs, and their weights as it reads them.

A Llama-like decoder is told by its parts: root-mean-square norms, one product each for queries, keys, values and
output, a gated SiLU network, rotary positions, a head. That the parts are used in the usual way is not to be seen from
outside; the check at load finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import UnsupportedModel
from outrider.native.linear import pack, unpack
from outrider.native.products import Linear
from outrider.native.screen import no_screen, screen_of
from outrider.native.step import Shape, Weights
from outrider.native.vectors import FLOATS, GROUP, ROWS
from outrider.target.openvino_convert import GraphTraits

PARTS = {
    "": {"model", "lm_head"},
    "model": {"embed_tokens", "layers", "norm", "rotary_emb"},
    "layer": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
BITS = {"float32": 32, "int8": 8, "int4": 4}  # of weights, by precision
HEAD_NORMS = frozenset({"q_norm", "k_norm"})  # may stand beside the products of attention


def recognise(model: Any, known: GraphTraits) -> Shape:
    """Raises `UnsupportedModel` where the model is not built of the usual parts."""
    name = type(model).__name__

    def demand(right: bool, what: str) -> None:
        if not right:
            raise UnsupportedModel(f"{name} {what}, which the runtime native does not run; use openvino or eager")

    def parts(module: Any, place: str, besides: frozenset[str] = frozenset()) -> None:
        own = {child for child, _ in module.named_children()}
        odd = sorted((own - besides) ^ PARTS[place])
        demand(not odd, f"is not built like Llama ({', '.join(odd)})")

    parts(model, "")
    parts(model.model, "model")
    layers = list(model.model.layers)
    for layer in layers:
        parts(layer, "layer")
        parts(layer.self_attn, "self_attn", HEAD_NORMS)
        parts(layer.mlp, "mlp")
        probe = torch.linspace(-6, 6, 25)
        demand(torch.allclose(layer.mlp.act_fn(probe), functional.silu(probe)), "has another activation than SiLU")
    first, shape = layers[0], known.shapes[0]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    demand(len(linears) == 7 * len(layers) + 1 and all(type(m) is nn.Linear for m in linears), "has odd products")
    sizes = [[(key, p.shape) for key, p in layer.named_parameters()] for layer in layers]
    demand(all(own == sizes[0] for own in sizes), "has layers that differ")
    demand(all(s.heads == shape.heads and s.key_dim == s.value_dim == shape.key_dim for s in known.shapes),
           "has keys unlike its values")  # fmt: skip
    norms = [m for m in model.modules() if hasattr(m, "variance_epsilon")]
    epsilons = {float(m.variance_epsilon) for m in norms}
    per_layer = 2 + sum(hasattr(first.self_attn, key) for key in HEAD_NORMS)
    demand(len(epsilons) == 1 and len(norms) == per_layer * len(layers) + 1, "has other norms than root-mean-square")
    heads = [getattr(first.self_attn, key) for key in HEAD_NORMS if hasattr(first.self_attn, key)]
    demand(all(m.weight.numel() == shape.key_dim for m in heads), "has norms over all heads together")
    try:
        cos, _ = model.model.rotary_emb(torch.zeros(1), torch.zeros((1, 1), dtype=torch.long))
    except Exception:
        cos = torch.zeros(0)
    demand(cos.shape[-1] == shape.key_dim, "turns its heads in a way of its own")
    demand(shape.key_dim % ROWS == 0, f"has heads of {shape.key_dim} values, no multiple of {ROWS}")
    scale = {float(getattr(layer.self_attn, "scaling", 0)) for layer in layers}
    demand(len(scale) == 1 and 0 not in scale, "scales its scores in a way of its own")
    count = first.self_attn.q_proj.out_features // shape.key_dim
    made = Shape(count, shape.heads, shape.key_dim, scale.pop(), epsilons.pop())
    asked = {size or 0 for _, size in known.rules}
    demand(asked == set(windows(model).tolist()), "has windows that are not told by its configuration")
    return made


def windows(model: Any) -> NDArray[np.int64]:
    """[L]: positions that a row sees, itself among them; 0: all."""
    text = model.config.get_text_config(decoder=True)
    size = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return np.array([size if kind == "sliding_attention" else 0 for kind in kinds], dtype=np.int64)


@torch.inference_mode()
def weights_of(model: Any, bits: int) -> Weights:
    """Copies, but for the embedding."""
    layers = list(model.model.layers)
    attention, head = [layer.self_attn for layer in layers], model.lm_head
    return Weights(
        _array(model.model.embed_tokens.weight),
        _norms([layer.input_layernorm for layer in layers]),
        _norms([layer.post_attention_layernorm for layer in layers]),
        _array(model.model.norm.weight),
        _norms([getattr(a, "q_norm", None) for a in attention]),
        _norms([getattr(a, "k_norm", None) for a in attention]),
        windows(model),
        screen_of(_array(head.weight)) if bits == 32 and head.bias is None else no_screen(),
        *(_linear(places, bits) for places in _places(model)),
    )


def read_by(linear: Linear) -> tuple[type, int, int]:
    """What its rows are made of, how wide they are, and how many sums of groups they come with."""
    groups = linear.values.shape[2]
    if linear.values.dtype == np.float32:
        return np.float32, groups * FLOATS, 0
    return np.int16, groups * GROUP, groups if linear.values.dtype == np.uint8 else 0


@contextmanager
def as_held(model: Any, weights: Weights) -> Iterator[None]:
    """The model with the weights that the step holds, for the length of a check."""
    linears = [own for own in weights if isinstance(own, Linear)]
    try:
        for linear, layers in zip(linears, _places(model), strict=True):
            for layer, modules in enumerate(layers):
                begin = 0
                for module in modules:
                    module.__dict__["forward"] = partial(_forward, module, linear, layer, begin)
                    begin += module.out_features
        yield
    finally:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.__dict__.pop("forward", None)


def _forward(module: nn.Linear, linear: Linear, layer: int, begin: int, x: Tensor) -> Tensor:
    end = begin + module.out_features
    blocks, scales = slice(begin // ROWS, -(-end // ROWS)), linear.scales[layer]
    own = scales[begin:end] if linear.values.dtype == np.int8 else scales[blocks]
    rows = unpack(linear.values[layer, blocks], own)[: module.out_features, : module.in_features]
    return functional.linear(x, torch.from_numpy(rows), module.bias)


def _places(model: Any) -> list[list[list[nn.Linear]]]:
    """For each product of `Weights`, in order, and each layer: the modules whose rows of weights it joins."""
    layers = list(model.model.layers)
    return [
        [[layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj] for layer in layers],
        [[layer.self_attn.o_proj] for layer in layers],
        [[layer.mlp.gate_proj] for layer in layers],
        [[layer.mlp.up_proj] for layer in layers],
        [[layer.mlp.down_proj] for layer in layers],
        [[model.lm_head]],
    ]


def _array(tensor: Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(tensor.detach().numpy())


def _norms(modules: Sequence[Any]) -> NDArray[np.float32]:
    return np.stack([np.zeros(0, np.float32) if m is None else _array(m.weight) for m in modules])


def _linear(places: Sequence[Sequence[nn.Linear]], bits: int) -> Linear:
    packed = [pack(np.concatenate([_array(m.weight) for m in modules]), bits) for modules in places]
    return Linear(np.stack([p.values for p in packed]), np.stack([p.scales for p in packed]), _biases(places))


def _biases(places: Sequence[Sequence[nn.Linear]]) -> NDArray[np.float32]:
    if all(m.bias is None for modules in places for m in modules):
        return np.zeros((len(places), 0), dtype=np.float32)
    rows = [[np.zeros(m.out_features, np.float32) if m.bias is None else _array(m.bias) for m in ms] for ms in places]
    return np.stack([np.concatenate(row) for row in rows])
