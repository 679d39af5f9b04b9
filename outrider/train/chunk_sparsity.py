"""Chunk sparsity: losses that let neighbouring tokens share experts, and how sparse a text is by token and by chunk.

After BlockFFN (arXiv 2507.08771). `locality` asks a token to use the experts of the token before it; `chunk_share` is
the share of experts that a chunk of tokens uses, softly. Both read what routers say before (z) or after (a) their ReLU,
[B, T, experts], and know no model. A loss of its own holds the sparsity by token at a target, so that models with and
without these losses can be compared at equal sparsity.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

STEEP = 100.0  # k: how sharply a score counts as active
TINY = 1e-5


def locality(scores: Tensor, text: Tensor | None = None, steep: float = STEEP) -> Tensor:
    """L_al: each token's scores are judged by whether the next token has the expert active; `text` [B, T]: no padding.

    The later token is the target, through which nothing is learnt.
    """
    wanted = torch.sigmoid(steep * scores[:, 1:].detach())
    each = F.binary_cross_entropy_with_logits(steep * scores[:, :-1], wanted, reduction="none").mean(-1)
    return _mean(each, None if text is None else text[:, 1:] & text[:, :-1])


def chunk_share(scores: Tensor, length: int, text: Tensor | None = None) -> Tensor:
    """L_cs in [0, 1]: how likely an expert is used somewhere in a chunk, where each token shares out one use.

    Padding uses nothing; what is left behind the last whole chunk does not count.
    """
    active = F.relu(scores.float())
    used = active / (TINY + active.sum(-1, keepdim=True))
    if text is not None:
        used = used * text[..., None]
    whole = used.shape[1] // length * length
    if not whole:
        return used.new_zeros(())
    missed = (1.0 - used[:, :whole]).clamp(min=TINY).log().unflatten(1, (-1, length)).sum(2).exp()
    return 1.0 - missed.mean()


def spread(scores: Tensor, text: Tensor | None = None) -> Tensor:
    """The mean of what is active, after it was given a mean square of one: the larger the more experts share the work.

    What a target of sparsity by token is held by.
    """
    active = F.relu(scores.float())
    normed = active * torch.rsqrt(active.square().mean(-1, keepdim=True) + TINY)
    return _mean(normed.mean(-1), text)


@dataclass(slots=True)
class AdaptiveWeight:
    """The weight of `chunk_share`: it rises by a ramp, then by as much as the loss does, and falls with it."""

    start: float = 5e-2
    ramp: int = 100  # steps
    every: int = 100  # steps between two judgements
    value: float = 0.0
    _step: int = 0
    _before: float | None = None
    _recent: deque[float] = field(default_factory=deque)

    def step(self, loss: float) -> float:
        """Changes state: the loss of one more update; the weight for the next."""
        self._step += 1
        self._recent.append(loss)
        if self._step <= self.ramp:
            self.value = self.start * self._step / self.ramp
        if len(self._recent) == self.every:
            now = fmean(self._recent)
            self._recent.clear()
            if self._before and self._step > self.ramp:
                ratio = now / self._before
                self.value *= max(ratio, 1.025) if ratio > 1 else ratio
            self._before = now
        self.value = min(self.value, 4 * self.start)
        return self.value


@dataclass(slots=True)
class SparsityTarget:
    """A weight for `spread` that holds the share of inactive experts of a token at a target."""

    wanted: float
    speed: float = 0.5
    value: float = 1e-2

    def step(self, sparsity: float) -> float:
        """Changes state: what one more update has shown; the weight for the next."""
        self.value = min(max(self.value * math.exp(self.speed * (self.wanted - sparsity)), 1e-6), 1.0)
        return self.value


def token_sparsity(active: Tensor) -> float:
    """Share of experts that a token does not use; `active` is [B, T, experts], bool."""
    return 1.0 - float(active.float().mean())


def chunk_sparsity(active: Tensor, length: int) -> float:
    """Share of experts that none of `length` consecutive tokens uses, over all such stretches."""
    return 1.0 - float(active.unfold(1, length, 1).any(-1).float().mean())


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    return values.mean() if mask is None else (values * mask).sum() / mask.sum().clamp(min=1)
