"""Kangaroo's adapter: one attention layer of its own behind the target's first layers, before the target's own head.

arXiv 2404.18911. Norm, attention and what flows past it, then a norm of its own; no MLP. Here it takes the place of the
last layer of a shortened copy of the target, so that any runtime runs it with a cache like any other draft model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models.truncate import chosen_layers, final_norm, layer_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = ("input_layernorm", "self_attn")  # of a decoder layer: what the adapter consists of
Weights = dict[str, tuple[Any, str]]  # by name: the module, and what the weight is called in it


class NoMlp(nn.Module):
    """Adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def kangaroo_model(target: PreTrainedModel, layer: int) -> tuple[PreTrainedModel, Weights]:
    """The first `layer` layers, an untrained adapter behind them, the target's head; and the adapter's weights."""
    total = layer_list(target)[1]
    if not 1 <= layer < total:
        raise InputError(f"exit layer {layer}: the target has {total}, use 1..{total - 1}")
    short = chosen_layers(target, range(layer + 1))
    last = short.get_submodule(f"{layer_list(short)[0]}.{layer}")
    return short, make_adapter(last, final_norm(short))


def filled_kangaroo(target: PreTrainedModel, layer: int, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model with these weights in the adapter, as precise as the target, on its device.

    KeyError or RuntimeError where they are not those of its adapter.
    """
    draft, weights = kangaroo_model(target, layer)
    if {n: w.shape for n, w in tensors.items()} != {n: owner._parameters[k].shape for n, (owner, k) in weights.items()}:
        raise RuntimeError("they are not the weights of an adapter behind that layer")
    for name, (owner, key) in weights.items():
        owner._parameters[key] = nn.Parameter(tensors[name].to(target.device, target.dtype), requires_grad=False)
    return draft


def make_adapter(layer: nn.Module, norm: nn.Module) -> Weights:
    """Changes a layer and the norm after it into an adapter with weights of its own, in float32, as they were.

    Those weights.
    """
    if not all(hasattr(layer, name) for name in (*PARTS, "mlp")):
        raise UnsupportedModel(
            f"layers of {type(layer).__name__} cannot be an adapter: they have no {', '.join(PARTS)}, mlp"
        )
    setattr(layer, "mlp", NoMlp())  # noqa: B010 - not a field that nn.Module declares
    weights = dict(_weights(layer, norm))
    for owner, key in weights.values():
        owner._parameters[key] = nn.Parameter(owner._parameters[key].detach().float().clone(), requires_grad=False)
    return weights


def _weights(layer: nn.Module, norm: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    for part, module in (*((name, getattr(layer, name)) for name in PARTS), ("norm", norm)):
        for name, owner in module.named_modules():
            for key, weight in owner._parameters.items():
                if weight is not None:
                    yield ".".join(filter(None, (part, name, key))), (owner, key)
