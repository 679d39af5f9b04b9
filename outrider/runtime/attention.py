"""Our attention function, registered with transformers, and how a model is switched to it for a forward.

Keys are never repeated for grouped queries: the query heads that share a key head become rows of one attention problem.
Soft caps and sinks are computed in float32 by hand, everything else by torch's fused kernel. Dropout is ignored: a
runtime only evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.runtime.passes import NAME, QUERY_SCALE, current_pass
from outrider.runtime.replaced import Replacement, replaced

ATTENTION = "_attn_implementation_internal"  # where a config keeps the name, past the setter that walks sub-configs


def attention_configs(model: Any) -> list[Any]:
    """Every configuration in which a part of the model looks up its attention."""
    return list({id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), ATTENTION)}.values())


def switched(configs: Sequence[Any], name: str) -> AbstractContextManager[None]:
    """The attention registered as `name`, for the duration of a forward."""
    return replaced([Replacement(vars(config), ATTENTION, name) for config in configs])


def attend(
    module: nn.Module,
    query: Tensor,  # [B, Hq, R, D]
    key: Tensor,  # [B, Hk, L, D]
    value: Tensor,  # [B, Hk, L, Dv]
    attention_mask: Tensor | None,  # additive [B, 1 or Hq, R, L]
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    current = current_pass()
    if current is not None:
        current.attended += 1
    if (factors := module.__dict__.get(QUERY_SCALE)) is not None:
        query = (query * factors).to(query.dtype)
    batch, heads, rows, dim = query.shape
    group = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], group * rows, dim)  # head h reads key head h // group
    if softcap is not None or s_aux is not None:
        out = _by_hand(query, key, value, attention_mask, dim**-0.5 if scaling is None else scaling, softcap, s_aux)
    else:
        mask = attention_mask
        if mask is not None and mask.shape[1] > 1:  # a head its own
            mask = mask.reshape(batch, key.shape[1], group * rows, -1)
        elif mask is not None and group > 1:
            mask = mask.repeat(1, 1, group, 1) if current is None else current.folded(mask, group)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None  # some models take views of it


def _by_hand(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, key_heads, folded, _ = query.shape
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scaling  # [B, Hk, G * R, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        grouped = scores.view(batch, key_heads, -1, mask.shape[2], scores.shape[-1])  # [B, Hk, G, R, L]
        by_head = mask.view(batch, key_heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
        scores = (grouped + by_head).view_as(scores)
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # a sink is a key without a value: it takes weight and gives nothing
        column = sinks.float().view(1, key_heads, -1, 1, 1)
        rows = folded // column.shape[2]
        column = column.expand(batch, -1, -1, rows, -1).reshape(batch, key_heads, folded, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


AttentionInterface.register(NAME, attend)
