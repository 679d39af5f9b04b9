"""Which layers of a model carry a state, and what stands in for their recurrences while a pass runs.

In transformers such a layer projects its rows, calls functions of its module for the convolution and the recurrence,
and projects again. These functions are replaced for the duration of a forward, by name, so that the model's own code
runs all products once for all rows. Layers that call none but compute in line have stand-ins in `inline`. What is in
neither place is unknown here, and its model is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.runtime.passes import current_pass
from outrider.runtime.recurrent.convolution import Convolution
from outrider.runtime.recurrent.hybrid_cache import HybridCache
from outrider.runtime.recurrent.inline import inline_stand_ins
from outrider.runtime.recurrent.linear import Decayed, DeltaRule
from outrider.runtime.recurrent.selective import SelectiveScan
from outrider.runtime.replaced import Replacement, replaced

_one_at_a_time = threading.RLock()


class Mixers:
    """What of a model is to be replaced: empty for models without recurrent layers."""

    def __init__(self, model: nn.Module) -> None:
        modules = {type(module).__module__ for module in model.modules()}
        namespaces = [vars(sys.modules[name]) for name in modules if name.startswith("transformers.")]
        with _one_at_a_time:  # nothing is replaced now
            self._found = [
                (namespace, name, partial(_in_a_pass, namespace[name], make))
                for namespace in namespaces
                for name, make in _STAND_INS.items()
                if callable(namespace.get(name))
            ] + inline_stand_ins(model)

    def __bool__(self) -> bool:
        return bool(self._found)

    @contextmanager
    def active(self, cache: HybridCache) -> Iterator[None]:
        """Changes the model for the duration of a forward, and the code of its family: one thread at a time.

        Other models of the family, which their owners run meanwhile in other threads, are what they were.
        """
        made = [Replacement(namespace, name, make(cache)) for namespace, name, make in self._found]
        with _one_at_a_time, replaced(made):
            yield


def _in_a_pass(
    plain: Callable[..., Any], stand_in: Callable[..., Any], cache: HybridCache
) -> Callable[..., Any]:  # fmt: skip
    def call(*args: Any, **named: Any) -> Any:
        return plain(*args, **named) if current_pass() is None else stand_in(cache, *args, **named)

    return call


# Each takes what the function takes that it stands in for. Layers do with the state that it returns what they like:
# the one that counts is in the cache.


def _convolve(
    cache: HybridCache, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn`: [B, C, R] in and out."""
    return cache.run(Convolution(weight, bias, activation), [hidden_states.transpose(1, 2)]).transpose(1, 2)


def _mamba2(
    cache: HybridCache, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba2_chunk_scan`: [B, R, H, P] in and out."""
    steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit).float()
    inputs = hidden_states.float()
    out = cache.run(Decayed(), [(A.float() * steps)[..., None], B, inputs * steps[..., None], C])
    if D is not None:
        out = out + D[:, None] * inputs
    return (out if z is None else out * F.silu(z.float())).contiguous(), _state(out)  # some models take views of it


def _mamba1(
    cache: HybridCache, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`mamba_selective_scan`: [B, D, R] in and out."""
    steps = _steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    rows = [steps, hidden_states.transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2)]
    out = cache.run(SelectiveScan(A), rows).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    return (out if z is None else out * F.silu(z)), _state(out)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _delta_rule(
    cache: HybridCache, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`, whose channels decay apart: [B, R, H, V]."""
    group = value.shape[2] // key.shape[2]
    query, key = query.float().repeat_interleave(group, 2), key.float().repeat_interleave(group, 2)
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    decays = g.float() if g.dim() == key.dim() else g.float()[..., None]
    rows = [decays, beta, key, value, query * query.shape[-1] ** -0.5]
    out = cache.run(DeltaRule(), rows).to(value.dtype)
    return out, _state(out)


def _state(out: Tensor) -> Tensor:
    return out.new_empty(0)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
