"""Which layers of a model carry a state, and what stands in for their recurrences while a pass runs.

In transformers such a layer projects its rows, calls functions of its module for the convolution and the recurrence,
and projects again. These functions are replaced for the duration of a forward, by name, so that the model's own code
runs all products once for all rows. A layer that calls none of them is unknown here, and its model is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from outrider.runtime.recurrent.convolution import Convolution
from outrider.runtime.recurrent.linear import Decayed, DeltaRule
from outrider.runtime.recurrent.selective import SelectiveScan
from outrider.runtime.recurrent.states import StateStore
from outrider.runtime.replaced import Replacement, replaced


class HybridCache(Cache):
    """A transformers cache of keys and values for some layers and of states for others, maybe both for one.

    To a layer it says that there is no state yet: what it would do with one is done by the stand-ins.
    """

    def __init__(self, attention: Cache, layers: dict[int, int] | None, states: StateStore) -> None:
        """`layers` are the places in `attention` of the model's layers, where they are not the same."""
        super().__init__(layers=[])
        self.attention, self.states = attention, states
        self._layers = layers
        self.layer, self.part = 0, 0  # whose function is called next

    def __len__(self) -> int:
        return len(self.attention)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Any:
        place = layer_idx if self._layers is None else self._layers[layer_idx]
        return self.attention.update(key_states, value_states, place, *args, **more)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.attention.get_seq_length(0))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length, 0)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.layer, self.part = layer_idx, state_idx

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.layer, self.part = layer_idx, state_idx
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.layer = layer_idx

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        return recurrent_states


class Mixers:
    """The functions of a model that are to be replaced."""

    def __init__(self, model: nn.Module) -> None:
        modules = {type(module).__module__: vars(sys.modules[type(module).__module__]) for module in model.modules()}
        self._found = [
            (namespace, name, make)
            for namespace in modules.values()
            for name, make in _STAND_INS.items()
            if callable(namespace.get(name)) and _is_transformers(namespace)
        ]

    def __bool__(self) -> bool:
        return bool(self._found)

    def active(self, cache: Cache) -> AbstractContextManager[None]:
        """Changes the model for the duration of a forward."""
        return replaced([Replacement(namespace, name, partial(make, cache)) for namespace, name, make in self._found])


def _convolve(
    cache: HybridCache, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn`: [B, C, R] in and out."""
    rows = [hidden_states.transpose(1, 2)]
    place = (cache.layer, f"convolution {cache.part}")
    return cache.states.run(place, Convolution(weight, bias, activation), rows).transpose(1, 2)


def _mamba2(
    cache: HybridCache, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`mamba2_chunk_scan`: [B, R, H, P] in and out."""
    steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
    inputs = hidden_states.float()
    rows = [A.float() * steps, B, inputs * steps[..., None], C]
    out = cache.states.run((cache.layer, "scan"), Decayed(), rows)
    if D is not None:
        out = out + D[:, None] * inputs
    return (out if z is None else out * F.silu(z.float())), None


def _mamba1(
    cache: HybridCache, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`mamba_selective_scan`: [B, D, R] in and out."""
    steps = _steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    rows = [steps, hidden_states.transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2)]
    out = cache.states.run((cache.layer, "scan"), SelectiveScan(A), rows).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    return (out if z is None else out * F.silu(z)), None


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _delta_rule(
    cache: HybridCache, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`torch_chunk_gated_delta_rule`: [B, R, H, V] in and out."""
    group = value.shape[2] // key.shape[2]
    query, key = query.float().repeat_interleave(group, 2), key.float().repeat_interleave(group, 2)
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    rows = [g.float(), beta, key, value, query * query.shape[-1] ** -0.5]
    return cache.states.run((cache.layer, "scan"), DeltaRule(), rows).to(value.dtype), None


_STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
    "torch_chunk_gated_delta_rule": _delta_rule,
}


def _is_transformers(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__", "")).startswith("transformers.")
