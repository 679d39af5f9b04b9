"""Stand-ins for recurrent layers that compute in line, recognised by their parts: MiniMax, RecurrentGemma, RWKV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from outrider.runtime.recurrent.convolution import Convolution
from outrider.runtime.recurrent.hybrid_cache import HybridCache
from outrider.runtime.recurrent.linear import Decayed
from outrider.runtime.recurrent.selective import GatedUnit, WeightedMean

StandIn = tuple[dict[str, Any], str, Callable[[HybridCache], Any]]  # `namespace[name]` during a forward


def inline_stand_ins(model: nn.Module) -> list[StandIn]:
    found: list[StandIn] = []
    for number, module in enumerate(model.modules()):
        kind = type(module)
        if not kind.__module__.startswith("transformers."):
            continue
        if all(hasattr(module, part) for part in ("slope_rate", "qkv_proj", "output_gate", "out_proj", "act_fn")):
            found.append((module.__dict__, "forward", partial(_with_cache, partial(_lightning, module))))
            found.append((vars(sys.modules[kind.__module__]), "MiniMaxCache", type))
        elif all(hasattr(module, part) for part in ("rg_lru", "conv_1d", "linear_x", "conv1d_state")):
            found += _griffin(module, number)
        elif all(hasattr(module, part) for part in ("blocks", "_rescale_layers", "layers_are_rescaled")):
            found += _rwkv(module)
    return found


def _with_cache(run: Callable[..., Any], cache: HybridCache) -> Callable[..., Any]:
    return partial(run, cache)


def _lightning(module: Any, cache: HybridCache, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Lightning attention: a decay a head, the same for all tokens."""
    heads = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    queries, keys, values = heads.split(module.head_dim, -1)  # [B, R, H, D] each
    decays = -module.slope_rate.view(-1, 1).expand(*values.shape[:3], 1)
    cache.turn(module.layer_idx)
    out = module.norm(cache.run(Decayed(), [decays, keys, values, queries]).flatten(2).to(hidden_states.dtype))
    return module.out_proj(module.output_gate(hidden_states).sigmoid() * out), None


def _stateless(forward: Callable[..., Any], number: int, cache: HybridCache, *args: Any, **named: Any) -> Any:
    """A module that keeps states of its own runs as if it had none, between our parts."""
    cache.turn(number)
    return forward(*args, **{**named, "use_cache": False})


def _griffin(block: Any, number: int) -> Iterator[StandIn]:
    """A recurrent block of Griffin."""
    convolution = block.conv_1d

    def convolve(cache: HybridCache, inputs: Tensor) -> Tensor:
        weight, bias = convolution.weight.squeeze(1), convolution.bias
        return cache.run(Convolution(weight, bias, None), [inputs.transpose(1, 2)]).transpose(1, 2)

    def scan(
        cache: HybridCache, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any
    ) -> tuple[Tensor, None]:  # fmt: skip
        out = cache.run(GatedUnit(), [recurrent_gate * ~reset, hidden_states])
        return out.to(hidden_states.dtype), None

    yield block.__dict__, "forward", partial(_with_cache, partial(_stateless, block.forward, number))
    yield convolution.__dict__, "forward", partial(_with_cache, convolve)
    yield block.rg_lru.__dict__, "_rnn_scan", partial(_with_cache, scan)


def _rwkv(model: Any) -> Iterator[StandIn]:
    """RWKV-4: in each layer two rows are mixed with the row before them, and one of these is read as a mean."""
    model._rescale_layers()  # as its first forward would, after which the weights stay as they are

    def shift(number: int, cache: HybridCache, hidden: Tensor) -> Tensor:
        cache.turn(number)
        return cache.run(Convolution(hidden.new_tensor([1.0, 0.0]).expand(hidden.shape[-1], 2), None, None), [hidden])

    def mean(
        cache: HybridCache, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, **_: Any
    ) -> tuple[Tensor, None]:  # fmt: skip
        out = cache.run(WeightedMean(-time_decay.float().exp(), time_first.float()), [key, value])
        return out.to(key.dtype), None

    yield model.__dict__, "forward", partial(_with_cache, partial(_stateless, model.forward, 0))
    yield vars(sys.modules[type(model).__module__]), "rwkv_linear_attention", partial(_with_cache, mean)
    mixed = [part for block in model.blocks for part in (block.attention, block.feed_forward)]
    for number, part in enumerate(mixed):
        yield part.time_shift.__dict__, "forward", partial(_with_cache, partial(shift, number))
