"""Models that take positions from the order in which rows are stored, and what stands in for that during a forward.

`position_ids` say where a row is in its text, by depth. Some models look elsewhere: at a table cut by the length of the
cache (ALiBi, learned positions, windows in attention code of their own) or at that length itself (temperature tuning).
What they would read there is replaced by the same values at the rows' positions, and put back after the forward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outrider.runtime.passes import QUERY_SCALE, Pass
from outrider.runtime.replaced import Replacement, replaced


@dataclass(frozen=True, slots=True)
class StandIn:
    """What `namespace[name]` is during a forward."""

    namespace: dict[str, Any]
    name: str
    make: Callable[[Pass], Any]
    what: str  # in words, for a runtime that cannot do this


class Cut:
    """Stands for a table that a model cuts by storage order: whatever cut it asks for, it gets `rows`."""

    def __init__(self, rows: Tensor, shape: Sequence[int] = ()) -> None:
        self.rows, self.shape = rows, tuple(shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, _: Any) -> Tensor:
        return self.rows


class TableEnds(TorchFunctionMode):
    """Notes where tables of positions end: those that two equal tokens, at positions 0 and 1, read in two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding and args[0].numel() == 2:
            first, second = args[0].flatten().tolist()
            if second == first + 1:
                self.ends.append(len(args[1]) - first)
        return func(*args, **(kwargs or {}))


def stand_ins(model: Any) -> list[StandIn]:
    return [*_biases(model), *_tables(model), *custom_windows(model), *_temperatures(model)]


def by_depth(found: Sequence[StandIn], current: Pass) -> AbstractContextManager[None]:
    """Changes the model for the duration of a forward."""
    return replaced([Replacement(s.namespace, s.name, s.make(current)) for s in found])


def _biases(model: Any) -> Iterator[StandIn]:
    """ALiBi: a bias by key position, which a function of the model's module builds for consecutive keys."""
    namespace = vars(sys.modules[type(model).__module__])
    if (padded := namespace.get("build_alibi_tensor")) is not None:

        def from_mask(current: Pass) -> Callable[..., Tensor]:
            def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
                positions = current.key_positions  # [B, L]
                plain = torch.ones((1, current.reach), dtype=torch.long, device=positions.device)
                bias = padded(plain, num_heads, dtype)  # [heads, 1, positions]
                return bias[:, 0, positions].transpose(0, 1).reshape(-1, 1, positions.shape[1])  # [B * heads, 1, L]

            return build

        yield StandIn(namespace, "build_alibi_tensor", from_mask, "ALiBi")
    if (whole := namespace.get("build_mpt_alibi_tensor")) is not None:

        def from_length(current: Pass) -> Callable[..., Cut]:
            def build(num_heads: int, _: int, *rest: Any, **named: Any) -> Cut:
                positions = current.key_positions
                bias = whole(num_heads, current.reach, *rest, **named)  # [heads, 1, positions]
                rows = bias[:, 0, positions].transpose(0, 1)[:, :, None]  # [B, heads, 1, L]
                return Cut(rows, (num_heads, 1, positions.shape[1]))

            return build

        yield StandIn(namespace, "build_mpt_alibi_tensor", from_length, "ALiBi")


def _tables(model: Any) -> Iterator[StandIn]:
    """Tables of positions, in models whose forward takes no `position_ids` (decoders of the BART family, RoFormer)."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or "Position" not in type(module).__name__:
            continue
        heads = module.embedding_dim != model.get_input_embeddings().embedding_dim  # rotates heads, is not added

        def look_up(current: Pass, module: Any = module, heads: bool = heads) -> Callable[..., Tensor | Cut]:
            rows = nn.Embedding.forward(module, current.positions + getattr(module, "offset", 0))  # [B, R, D]
            return lambda *_, **__: Cut(rows[:, None]) if heads else rows

        yield StandIn(module.__dict__, "forward", look_up, "a table of positions read by the length of the cache")


def custom_windows(model: Any) -> Iterator[StandIn]:
    """GPT-Neo's masks, a square by storage order in each layer."""
    for module in model.modules():
        if type(module).__name__ != "GPTNeoSelfAttention":
            continue
        width = int(module.bias[0, 0, -1].sum())  # keys that the last row sees

        def near(current: Pass, width: int = width) -> Cut:
            distance = current.positions[:, None, :, None] - current.key_positions[:, None, None, :]
            return Cut(distance < width)  # [B, 1, R, L]

        yield StandIn(module.__dict__, "bias", near, "masks by storage order")


def _temperatures(model: Any) -> Iterator[StandIn]:
    """Llama 4: queries grow with the position, in layers without rotary positions; ours does that by depth."""
    for module in model.modules():
        if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
            continue

        def scale(current: Pass, module: Any = module) -> Tensor:
            steps = torch.floor((current.positions.float() + 1.0) / module.floor_scale)
            return (torch.log1p(steps) * module.attn_scale + 1.0)[:, None, :, None]  # [B, 1, R, 1]

        words = "attention temperature tuning"
        yield StandIn(module.__dict__, "attn_temperature_tuning", lambda _: False, words)
        yield StandIn(module.__dict__, QUERY_SCALE, scale, words)
