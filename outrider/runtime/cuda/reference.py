"""What the kernels of a captured step compute, in plain torch: the judge in tests, and what runs where Triton does not.

Same names and arguments as the kernels, so that either set can be handed to whoever calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.noise import race_scores

WORD = 64  # nodes in one mask word
MAX_NODES = 2 * WORD


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a step stand; all tensors int64 on the device, their values may change between launches."""

    slots: Tensor  # [B] place in the cache
    lengths: Tensor  # [B] committed tokens
    nodes: Tensor  # [B] nodes in flight behind them
    positions: Tensor  # [B, R] text position of each row
    words: Tensor  # [B, R, W] bit j: the row sees node j

    @property
    def batch(self) -> int:
        return self.positions.shape[0]

    @property
    def rows(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm in front of a product."""

    weight: Tensor  # [K]
    eps: float


@dataclass(frozen=True, slots=True)
class Fresh:
    """Keys and values of the rows themselves, where the cache does not hold them yet; keys are rotated like queries."""

    key: Tensor  # [B, Hk, R, D]
    value: Tensor  # [B, Hk, R, Dv]
    places: Tensor  # [B, R] rows of the slot


pick = race_scores  # the target's own tokens


def tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, layout: Layout, scaling: float, *, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None,
    fresh: Fresh | None = None,
) -> Tensor:  # fmt: skip
    """In float64, whatever the dtype of what comes in. Changes state: fresh rows are stored first."""
    if fresh is not None:
        store_rows(fresh.key, fresh.value, keys, values, layout.slots, fresh.places, rotary)
    batch, heads, rows, _ = query.shape
    q = query.double()
    if rotary is not None:
        cos, sin = (part.double()[:, None] for part in rotary)
        first, second = q.chunk(2, -1)
        q = q * cos + torch.cat([-second, first], -1) * sin
    group = heads // keys.shape[1]
    k, v = (part[layout.slots].double().repeat_interleave(group, 1) for part in (keys, values))  # [B, Hq, C, D]
    place = torch.arange(keys.shape[2], device=query.device)
    node = place - layout.lengths[:, None]  # [B, C]
    committed = (node < 0)[:, None].expand(-1, rows, -1)
    if window is not None:
        committed = committed & (place > layout.positions[..., None] - window)
    which = node.clamp(0, MAX_NODES - 1)[:, None].expand(-1, rows, -1)  # [B, R, C]
    word = layout.words.gather(2, (which // WORD).clamp(max=layout.words.shape[2] - 1))
    flying = (node >= 0) & (node < layout.nodes[:, None])
    sees = committed | (flying[:, None] & ((word >> (which % WORD)) & 1).bool())
    scores = q @ k.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).to(query.dtype)


def streams(x: Tensor, weights: Sequence[Tensor]) -> bool:
    return True


def project(
    x: Tensor, weights: Sequence[Tensor], *, biases: Sequence[Tensor | None] = (None, None, None),
    norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    parts = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=False)]
    out = gate(*parts) if gated else torch.cat(parts, -1)
    return out if residual is None else residual + out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def parts(x: Tensor, weight: Tensor) -> Tensor | None:
    """A product as parts [P, ..., N] to be added up, where a kernel leaves it so; here none does."""
    return None


def joined(y: Tensor, like: Tensor) -> Tensor:
    """A product, or the sum of its parts rounded as one."""
    return y if y.dim() == like.dim() else y.sum(0).to(like.dtype)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A sum, and its norm; `y` may come in parts."""
    whole = x + joined(y, x)
    return whole, rms_norm(whole, weight, eps)


def likeliest(logits: Tensor) -> Tensor:
    """The first of the largest."""
    return logits.argmax(-1).int()


def gated(x: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    """SiLU of the first product times the second, where a kernel does both at once; here none does."""
    return None


def gate(first: Tensor, second: Tensor) -> Tensor:
    return F.silu(first) * second


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [B, H, R, D], halves rotated against each other."""
    cos, sin = (part[:, None] for part in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def store_rows(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, places: Tensor,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Changes state: row r of sequence b becomes row places[b, r] of slot slots[b]."""
    key = key if rotary is None else rotated(key, rotary)
    keys.transpose(1, 2)[slots[:, None], places] = key.transpose(1, 2)
    values.transpose(1, 2)[slots[:, None], places] = value.transpose(1, 2)


def move_rows(block: Tensor, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Changes state: row sources[b, i] of slot slots[b] becomes row targets[b, i], in all layers; -1 moves nothing."""
    b, i = torch.nonzero(sources >= 0, as_tuple=True)
    block[:, slots[b], :, targets[b, i]] = block[:, slots[b], :, sources[b, i]]


def top(logits: Tensor, count: int, temperature: Tensor | None = None) -> Tensor:
    """[2, ..., count] int32: ids, likeliest first and of equals the lower, and the bits of their log-probabilities."""
    scores = logits.float() if temperature is None else logits.float() / temperature.view(*logits.shape[:-1], 1)
    values, ids = (part[..., :count] for part in scores.sort(dim=-1, descending=True, stable=True))
    short = count - values.shape[-1]
    values, ids = F.pad(values, (0, short), value=-torch.inf), F.pad(ids, (0, short), value=-1)
    logprobs = (values - scores.logsumexp(-1, keepdim=True)).masked_fill(values.isneginf(), -torch.inf)
    return torch.stack([ids.masked_fill(values.isneginf(), -1).int(), logprobs.view(torch.int32)])
