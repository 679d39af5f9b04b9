"""Which models the native step runs, and their weights as it reads them.

A Llama-like decoder is told by its parts: root-mean-square norms, one product each for queries, keys, values and
output, a gated SiLU network, rotary positions, a head. That the parts are used in the usual way is not to be seen from
outside; the check at load finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import UnsupportedModel
from outrider.runtime.native.held import Held, unread
from outrider.runtime.native.kernels.linear import pack, unpack, unpacked_rows
from outrider.runtime.native.kernels.products import Linear, single
from outrider.runtime.native.kernels.screen import no_screen, screen_of
from outrider.runtime.native.kernels.step import Sizes, Weights
from outrider.runtime.native.kernels.vectors import FLOATS, GROUP, ROWS
from outrider.runtime.replaced import Replacement, replaced
from outrider.runtime.support import context_limit, refuse_quantised

if TYPE_CHECKING:
    from outrider.runtime.probe import ModelFacts

PARTS = {
    "": {"model", "lm_head"},
    "model": {"embed_tokens", "layers", "norm", "rotary_emb"},
    "layer": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
SOME = 1 << 19  # weights that are made float32 together
BITS = {"float32": 32, "int8": 8, "int4": 4}  # of weights, by precision
HEAD_NORMS = frozenset({"q_norm", "k_norm"})  # may stand beside the products of attention


def recognise(model: Any, facts: ModelFacts) -> Sizes:
    """Raises `UnsupportedModel` where the model is not built of the usual parts."""
    name = type(model).__name__
    refuse_quantised(model, "native")

    def demand(right: bool, what: str) -> None:
        if not right:
            raise UnsupportedModel(f"{name} {what}, which the runtime native does not run; use openvino or eager")

    def parts(module: Any, place: str, besides: frozenset[str] = frozenset()) -> None:
        children = {child for child, _ in module.named_children()}
        odd = sorted((children - besides) ^ PARTS[place])
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
    first, shape = layers[0], facts.shapes[0]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    demand(len(linears) == 7 * len(layers) + 1 and all(type(m) is nn.Linear for m in linears), "has odd products")
    parameters = [[(key, p.shape) for key, p in layer.named_parameters()] for layer in layers]
    demand(all(of_layer == parameters[0] for of_layer in parameters), "has layers that differ")
    demand(all(s.heads == shape.heads and s.key_dim == s.value_dim == shape.key_dim for s in facts.shapes),
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
    demand(cos.shape[-1] == shape.key_dim, "rotates its heads in a way of its own")
    demand(shape.key_dim % ROWS == 0, f"has heads of {shape.key_dim} values, no multiple of {ROWS}")
    scale = {float(getattr(layer.self_attn, "scaling", 0)) for layer in layers}
    demand(len(scale) == 1 and 0 not in scale, "scales its scores in a way of its own")
    count = first.self_attn.q_proj.out_features // shape.key_dim
    sizes = Sizes(count, shape.heads, shape.key_dim, scale.pop(), epsilons.pop())
    asked = {size or 0 for _, size in facts.rules}
    demand(asked == set(windows(model).tolist()), "has windows that are not told by its configuration")
    return sizes


def windows(model: Any) -> NDArray[np.int64]:
    """[L]: positions that a row sees, itself among them; 0: all."""
    text = model.config.get_text_config(decoder=True)
    size = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return np.array([size if kind == "sliding_attention" else 0 for kind in kinds], dtype=np.int64)


@torch.inference_mode()
def weights_of(model: Any, bits: int) -> Weights:
    """Copies."""
    layers, embedding = list(model.model.layers), model.model.embed_tokens
    attention, head = [layer.self_attn for layer in layers], model.lm_head
    *products, of_head = places(model)
    linears = [*(_linear(of_layers, bits) for of_layers in products), _linear(of_head, table_bits(bits))]
    tied = head.weight is embedding.weight
    return Weights(
        table_of(linears[-1]) if tied else single(pack(_array(embedding.weight), table_bits(bits))),
        norms([layer.input_layernorm for layer in layers]),
        norms([layer.post_attention_layernorm for layer in layers]),
        _array(model.model.norm.weight),
        norms([getattr(a, "q_norm", None) for a in attention]),
        norms([getattr(a, "k_norm", None) for a in attention]),
        windows(model),
        screen_of(_array(head.weight)) if bits == 32 and head.bias is None else no_screen(),
        *linears,
    )


def table_bits(bits: int) -> int:
    """Of embedding and head, by those of the other weights: a head of four bits is what moves logits most."""
    return max(bits, 8)


def table_of(head: Linear) -> Linear:
    """The embedding of a model whose head it is."""
    return head._replace(bias=np.zeros((1, 0), np.float32))


def held_of(model: Any, weights: Weights, sizes: Sizes, facts: ModelFacts) -> Held:
    """What a backend needs, with the model's rule of positions."""
    inner = model.model.layers[0].mlp.up_proj.out_features

    def angles(places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = model.model.rotary_emb(torch.zeros(1), places[None])
        return cos[0], sin[0]

    return Held(
        weights, sizes, len(facts.shapes), facts.vocab_size, inner, context_limit(model.config), angles
    )  # fmt: skip


def read_by(linear: Linear) -> tuple[type, int, int]:
    """What its rows are made of, how wide they are, and how many sums of groups they come with."""
    groups = linear.values.shape[2]
    if linear.values.dtype == np.float32:
        return np.float32, groups * FLOATS, 0
    return np.int16, groups * GROUP, groups if linear.values.dtype == np.uint8 else 0


def rows_of(linear: Linear, tokens: Tensor, width: int) -> Tensor:
    """Rows of an embedding, [..., width]."""
    rows = unpacked_rows(linear.values[0], linear.scales[0], tokens.reshape(-1).numpy())
    return torch.from_numpy(rows[:, :width]).reshape(*tokens.shape, width)


def as_held(model: Any, weights: Weights) -> AbstractContextManager[None]:
    """The model with the weights that the step holds, for the length of a check."""
    table = partial(rows_of, weights.embedding, width=len(weights.last))
    replacements = [Replacement(vars(model.get_input_embeddings()), "forward", table)]
    for linear, layers in zip(products(weights), places(model), strict=True):
        for layer, modules in enumerate(layers):
            begin = 0
            for module in modules:
                forward = partial(_forward, module, linear, layer, begin)
                replacements.append(Replacement(vars(module), "forward", forward))
                begin += module.out_features
    return replaced(replacements)


def products(weights: Weights) -> list[Linear]:
    """Those of `places`."""
    return [weights.qkv, weights.out, weights.gate, weights.up, weights.down, weights.head]


def _forward(module: nn.Linear, linear: Linear, layer: int, begin: int, x: Tensor) -> Tensor:
    """Some rows at a time: a head of a large vocabulary would take more memory in float32 than all of the model."""
    out, end = x.new_empty(*x.shape[:-1], module.out_features), begin + module.out_features
    some = max(SOME // module.in_features // ROWS, 1) * ROWS
    for low in range(begin, end, some):
        high = min(low + some, end)
        blocks, scales = slice(low // ROWS, -(-high // ROWS)), linear.scales[layer]
        part = scales[low:high] if linear.values.dtype == np.int8 else scales[blocks]
        rows = unpack(linear.values[layer, blocks], part)[: high - low, : module.in_features]
        bias = None if module.bias is None else module.bias[low - begin : high - begin]
        out[..., low - begin : high - begin] = functional.linear(x, torch.from_numpy(rows), bias)
    unread(linear.values)
    return out


def places(model: Any) -> list[list[list[nn.Linear]]]:
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


def norms(modules: Sequence[Any]) -> NDArray[np.float32]:
    return np.stack([np.zeros(0, np.float32) if m is None else _array(m.weight) for m in modules])


def _linear(places: Sequence[Sequence[nn.Linear]], bits: int) -> Linear:
    packed = [pack(np.concatenate([_array(m.weight) for m in modules]), bits) for modules in places]
    return Linear(np.stack([p.values for p in packed]), np.stack([p.scales for p in packed]), biases(places))


def biases(places: Sequence[Sequence[nn.Linear]]) -> NDArray[np.float32]:
    if all(m.bias is None for modules in places for m in modules):
        return np.zeros((len(places), 0), dtype=np.float32)
    rows = [[np.zeros(m.out_features, np.float32) if m.bias is None else _array(m.bias) for m in ms] for ms in places]
    return np.stack([np.concatenate(row) for row in rows])
