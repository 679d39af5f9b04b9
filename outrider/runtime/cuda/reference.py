"""What the kernels of a captured step compute, in plain torch: the judge in tests, and what runs where Triton does not.

Same names and arguments as the kernels, so that either set can be handed to whoever calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.noise import race_scores

WORD = 64  # nodes in one mask word
MAX_NODES = 2 * WORD


@dataclass(frozen=True, slots=True)
class Layout:
    """Whose rows stand where in a pass; all tensors int64 on the device, their values may change between launches.

    The rows of a sequence stand one behind another and run the last of its nodes in flight.
    """

    slots: Tensor  # [B] place in the cache
    lengths: Tensor  # [B] committed tokens
    nodes: Tensor  # [B] nodes in flight behind them
    begins: Tensor  # [B + 1] first row of each sequence, never falling from 0 on; last, the number of all rows
    counts: Tensor  # [B] rows; what follows up to the next sequence is padding
    causal: Tensor  # [B] 1: the nodes are text, and a row sees all before it; 0: they are a tree
    positions: Tensor  # [T] text position of each row
    words: Tensor  # [T, W] bit j: the row sees node j of its tree

    @property
    def sequences(self) -> int:
        return self.slots.shape[0]

    @property
    def rows(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm in front of a product."""

    weight: Tensor  # [K]
    eps: float


@dataclass(frozen=True, slots=True)
class Fresh:
    """Keys and values of the rows themselves, where the cache does not hold them yet; keys are rotated like queries."""

    key: Tensor  # [1, Hk, T, D]
    value: Tensor  # [1, Hk, T, Dv]


pick = race_scores  # the target's own tokens


def tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, layout: Layout, scaling: float, *, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None,
    fresh: Fresh | None = None,
) -> Tensor:  # fmt: skip
    """In float64, whatever the dtype of what comes in; padding gives zeros. Changes state: fresh rows are stored."""
    q = query.double()
    if rotary is not None:
        q = rotated(q, (rotary[0].double(), rotary[1].double()))
    if fresh is not None:
        key = fresh.key if rotary is None else rotated(fresh.key, rotary)
    heads, group = query.shape[1], query.shape[1] // keys.shape[1]
    out = query.new_zeros((1, layout.rows, heads, values.shape[3]))
    each = (layout.slots, layout.lengths, layout.nodes, layout.begins, layout.counts, layout.causal)
    for slot, length, nodes, begin, count, causal in zip(*(part.tolist() for part in each), strict=False):
        rows, reach = slice(begin, begin + count), length + nodes
        if count == 0 or reach == 0:
            continue
        if fresh is not None:
            keys[slot, :, reach - count : reach] = key[0, :, rows]
            values[slot, :, reach - count : reach] = fresh.value[0, :, rows]
        k, v = (part[slot, :, :reach].double().repeat_interleave(group, 0) for part in (keys, values))  # [Hq, C, D]
        scores = q[0, :, rows] @ k.transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        sees = _sees(layout, rows, length, nodes, causal == 1, window)
        scores = scores.masked_fill(~sees, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., :reach].nan_to_num(0.0)  # a row that sees nothing gives zeros
        out[0, rows] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def _sees(layout: Layout, rows: slice, length: int, nodes: int, causal: bool, window: int | None) -> Tensor:
    """[rows, length + nodes]: which rows of its slot's cache a row of one sequence sees."""
    place = torch.arange(length + nodes, device=layout.words.device)
    count = rows.stop - rows.start
    stands = length + nodes - count + torch.arange(count, device=place.device)  # where each row is stored
    text = place <= stands[:, None] if causal else (place < length).expand(count, -1)
    if window is not None:
        text = text & (place > layout.positions[rows, None] - window)
    if causal:
        return text
    node = (place - length).clamp(0, WORD * layout.words.shape[1] - 1)
    word = layout.words[rows][:, node // WORD]
    return text | ((place >= length) & ((word >> (node % WORD)) & 1).bool())


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
    """A product, or the sum of its parts, one after another, rounded as one."""
    return y if y.dim() == like.dim() else reduce(torch.add, y).to(like.dtype)


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
    """Changes state: row t of the pass becomes row places[t] of slot slots[t]."""
    key = key if rotary is None else rotated(key, rotary)
    keys.transpose(1, 2)[slots, places] = key[0].transpose(0, 1)
    values.transpose(1, 2)[slots, places] = value[0].transpose(0, 1)


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
