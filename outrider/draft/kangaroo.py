"""Kangaroo's adapter: one attention layer of its own behind the target's first layers, before the target's own head.

arXiv 2404.18911. Norm, attention and what flows past it, then a norm of its own; no MLP. Here it takes the place of the
last layer of a shortened copy of the target, so that any runtime runs it with a cache like any other draft model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import UnsupportedModel

PARTS = ("input_layernorm", "self_attn")  # of a decoder layer: what the adapter consists of


class NoMlp(nn.Module):
    """Adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def make_adapter(layer: nn.Module, norm: nn.Module) -> dict[str, tuple[Any, str]]:
    """Changes a layer and the norm after it into an adapter with weights of its own, in float32, as they were.

    The weights as (module, key), by name.
    """
    if not all(hasattr(layer, name) for name in (*PARTS, "mlp")):
        raise UnsupportedModel(
            f"layers of {type(layer).__name__} cannot be an adapter: they have no {', '.join(PARTS)}, mlp"
        )
    setattr(layer, "mlp", NoMlp())  # noqa: B010 - not a field that nn.Module declares
    own = dict(_weights(layer, norm))
    for owner, key in own.values():
        owner._parameters[key] = nn.Parameter(owner._parameters[key].detach().float().clone(), requires_grad=False)
    return own


def _weights(layer: nn.Module, norm: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    for part, module in (*((name, getattr(layer, name)) for name in PARTS), ("norm", norm)):
        for name, owner in module.named_modules():
            for key, weight in owner._parameters.items():
                if weight is not None:
                    yield ".".join(filter(None, (part, name, key))), (owner, key)
