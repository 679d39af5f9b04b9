"""What verification reveals while a drafter is in use: stretches of text with what the target thought there, bounded.

A row stands for one token of the text: the target's features there and its distribution of the next token, cut to the
likeliest of the tokens the drafter can say; the rest of the mass is one number. Rows come from the forwards that
decoding needs anyway and stay on the target's device; nothing waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that follow each other in one text. A weight of 0: only there to be looked at."""

    tokens: Tensor  # [n]
    features: Tensor  # [n, k * d], half precision
    places: Tensor  # [n, top]: the draft ids of the likeliest tokens
    probs: Tensor  # [n, top]: their chances among the tokens the drafter can say
    weights: Tensor  # [n]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.tokens, self.features, self.places, self.probs, self.weights

    def __getitem__(self, at: slice) -> Stretch:
        return Stretch(*(part[at] for part in self.parts))

    def silent(self) -> Stretch:
        """The same rows as context: nothing is learnt from what the target said there."""
        return Stretch(self.tokens, self.features, self.places, self.probs, torch.zeros_like(self.weights))


def context_rows(tokens: Tensor, features: Tensor, top: int) -> Stretch:
    """Rows of a prompt, where nobody asked what comes next."""
    count, device = len(tokens), features.device
    places = torch.zeros(count, top, dtype=torch.int32, device=device)
    return Stretch(
        tokens.to(device, torch.int32), _halved(features), places, torch.zeros(count, top, device=device),
        torch.zeros(count, device=device),
    )  # fmt: skip


def verified_rows(
    tokens: Tensor, features: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, top: int
) -> Stretch:  # fmt: skip
    """Rows that were verified; where the target's choice is no token of the drafter's, nothing can be learnt."""
    device = features.device
    inside = torch.isin(logits.argmax(-1), ids)
    every = logits.index_select(-1, ids).float().softmax(-1)
    probs, places = every.topk(min(top, len(ids)), dim=-1)
    return Stretch(
        tokens.to(device, torch.int32), _halved(features), places.to(torch.int32), probs, weights.to(device) * inside
    )  # fmt: skip


def _halved(features: Tensor) -> Tensor:
    half = torch.bfloat16 if features.dtype == torch.bfloat16 else torch.float16
    limit = torch.finfo(half).max
    return features.detach().clamp(-limit, limit).to(half, copy=True)


def joined(stretches: Sequence[Stretch]) -> Stretch:
    return Stretch(*(torch.cat(same) for same in zip(*(stretch.parts for stretch in stretches), strict=True)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Stretches of one length, filled up at the end with rows that do not count."""

    tokens: Tensor  # [B, n]
    features: Tensor  # [B, n, k * d], float32
    places: Tensor  # [B, n, top]
    probs: Tensor  # [B, n, top]
    weights: Tensor  # [B, n]


def batched(stretches: Sequence[Stretch]) -> Batch:
    longest = max(map(len, stretches))

    def stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        made = parts[0].new_zeros((len(parts), longest, *parts[0].shape[1:]), dtype=dtype)
        for i, part in enumerate(parts):
            made[i, : len(part)] = part
        return made

    kinds = (torch.int64, torch.float32, torch.int64, torch.float32, torch.float32)
    columns = zip(*(stretch.parts for stretch in stretches), strict=True)
    return Batch(*(stacked(list(parts), kind) for parts, kind in zip(columns, kinds, strict=True)))


@dataclass(slots=True)
class Corrections:
    """The newest stretches that fit into so many bytes. One thread adds; others may read a `snapshot`."""

    limit: int  # bytes
    nbytes: int = 0
    added: int = 0  # stretches ever
    _kept: deque[tuple[int, Stretch]] = field(default_factory=deque)

    def add(self, stretch: Stretch) -> None:
        """Changes state: the oldest make room; what is larger than all the room is left out."""
        if stretch.nbytes > self.limit:
            return
        self._kept.append((self.added, stretch))
        self.added += 1
        self.nbytes += stretch.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._kept.popleft()[1].nbytes

    def snapshot(self, since: int = 0) -> list[Stretch]:
        """Those added as number `since` or later that are still here, oldest first."""
        return [stretch for number, stretch in list(self._kept) if number >= since]

    def __len__(self) -> int:
        return len(self._kept)
