"""A drafter's copy that learns from corrections, and what tells whether it has become better.

The loss is the forward KL to the target's distribution over the tokens kept and all others as one; better is what is
accepted more often on text that neither copy has learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.train.kinds.eagle3 import following, unrolled
from outrider.train.online.buffer import Batch, Stretch, batched


@dataclass(frozen=True, slots=True)
class AdaptPlan:
    bytes: int = 64 << 20  # of corrections kept
    every: int = 256  # rows that come in between two updates
    steps: int = 8  # of the optimizer, an update
    batch: int = 4  # stretches a step
    length: int = 96  # rows of a stretch
    context: int = 32  # of them, rows that are only looked at
    lr: float = 1e-4
    unroll: int = 5
    decay: float = 0.8  # weight of each unrolled step against the one before
    stood: float = 0.3  # weight of a position whose proposal stood, or that had none; a fallen one has 1
    runs: float = 0.2  # weight of the runs that the target says in one token; for a draft of another vocabulary
    top: int = 64  # tokens of a distribution that are kept
    held_out: float = 0.25  # of the newest stretches, which only judge
    share: float = 1.0  # of the time that updates may take in the background
    background: bool = True  # else updates happen when the last running sequence ends
    seed: int = 0


def check_plan(plan: AdaptPlan) -> None:
    if min(plan.bytes, plan.every, plan.steps, plan.batch, plan.unroll, plan.top) < 1:
        raise InputError("bytes, every, steps, batch, unroll and top of an adaptation must be above zero")
    if not (0 < plan.context < plan.length and 0 < plan.held_out < 1 and plan.lr >= 0 and 0 < plan.share <= 1):
        raise InputError("an adaptation wants 0 < context < length, 0 < held_out < 1 and a learning rate of 0 or more")


class Student:
    """A copy in float32 with its optimizer."""

    def __init__(self, live: Eagle3Layer, plan: AdaptPlan) -> None:
        self.plan = plan
        self.like = next(live.parameters()).dtype
        self.net = twin(live, torch.float32).requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(
        self, embed: Callable[[Tensor], Tensor], newest: Sequence[Stretch], older: Sequence[Stretch],
        noise: torch.Generator,
    ) -> Eagle3Layer:  # fmt: skip
        """A few steps, each half on what came last and half on anything kept; a frozen copy of what came out."""
        for _ in range(self.plan.steps):
            chosen = [_pick(newest if i % 2 == 0 else older, noise) for i in range(self.plan.batch)]
            self.optimizer.zero_grad(set_to_none=True)
            loss(self.net, embed, batched(chosen), self.plan).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
        return twin(self.net, self.like)


def twin(net: Eagle3Layer, dtype: torch.dtype) -> Eagle3Layer:
    """A frozen copy of the weights alone: the original may be in use by another thread at this moment."""
    made = type(net)(net.shape, net.ids).to(net.ids.device)
    made.load_state_dict({name: weight.detach() for name, weight in net.state_dict().items()})
    return made.to(dtype).requires_grad_(False)


def _pick(stretches: Sequence[Stretch], noise: torch.Generator) -> Stretch:
    return stretches[int(torch.randint(len(stretches), (), generator=noise))]


def steps_of(net: Eagle3Layer, embed: Callable[[Tensor], Tensor], batch: Batch, steps: int) -> Iterator[Tensor]:
    """Log chances over the draft vocabulary after each column, step by step: [B, n, vocabulary]."""
    like = next(net.parameters()).dtype
    with torch.no_grad():
        embedded = embed(following(batch.tokens)).to(like)
    for after in unrolled(net, embedded, net.fuse(batch.features.to(like)), steps):
        yield net.logits(after).float().log_softmax(-1)


def counting(batch: Batch, step: int) -> Tensor:
    """[B, n]: column u says what row u + 1 said; the last says nothing, nor one whose chain began before the text."""
    weights = following(batch.weights).clone()
    weights[:, -1] = 0.0
    weights[:, :step] = 0.0
    return weights


def loss(net: Eagle3Layer, embed: Callable[[Tensor], Tensor], batch: Batch, plan: AdaptPlan) -> Tensor:
    """Forward KL to the target's distribution over the tokens kept and all others as one, a weighted position."""
    p, places = following(batch.probs), following(batch.places)
    rest = (1 - p.sum(-1)).clamp(min=1e-6)
    total, share = torch.zeros((), device=p.device), 0.0
    for step, log_q in enumerate(steps_of(net, embed, batch, plan.unroll)):
        log_kept = log_q.gather(-1, places)
        log_rest = (1 - log_kept.exp().sum(-1)).clamp(min=1e-6).log()
        far = (p * (p.clamp(min=1e-9).log() - log_kept)).sum(-1) + rest * (rest.log() - log_rest)
        weights = counting(batch, step)
        total = total + plan.decay**step * (far * weights).sum() / weights.sum().clamp(min=1e-6)
        share += plan.decay**step
    return total / share


@torch.no_grad()
def judge(
    net: Eagle3Layer, embed: Callable[[Tensor], Tensor], stretches: Sequence[Stretch], plan: AdaptPlan
) -> Tensor:  # fmt: skip
    """The chance that a drawn token is accepted, at every position of this text and in every unrolled step."""
    found = []
    for first in range(0, len(stretches), plan.batch):
        batch = batched(stretches[first : first + plan.batch])
        p, places = following(batch.probs), following(batch.places)
        for step, log_q in enumerate(steps_of(net, embed, batch, plan.unroll)):
            drawn = torch.minimum(p, log_q.gather(-1, places).exp()).sum(-1)
            found.append(drawn[counting(batch, step) > 0])
    return torch.cat(found).double().cpu()


def is_worse(after: Tensor, before: Tensor) -> bool:
    """By more than the error of the mean, position by position: less may be chance, and would stop all progress."""
    change = after - before
    return float(change.mean()) < -float(change.std()) / max(len(change), 1) ** 0.5
