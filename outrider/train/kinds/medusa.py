"""Training Medusa's heads: each says what the target would, one token further ahead, from the target's last feature.

arXiv 2401.10774 (Medusa-1: the target is frozen). Column u reads the feature at u; head k is held against the target's
distribution of the token at u + 2 + k, which the target gave when it had seen the text up to there. Soft targets:
averaged over the text they teach the same as its tokens would, with less noise; `--loss ce` comes nearest to the
paper's hard labels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models import LoadedModel
from outrider.models.drafts import packed
from outrider.models.networks.heads import HeadsShape, MedusaHeads
from outrider.models.trained import load_trained, target_head
from outrider.train.kinds.eagle2 import drafter_head, head_size
from outrider.train.kinds.eagle3 import draft_vocabulary, log_total
from outrider.train.loop import LOSS_HELP, LoopPlan, Point, fast, parts, setting, split
from outrider.train.losses import LOSSES, Loss
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsPlan(LoopPlan):
    loss: str = setting("kl", LOSS_HELP)
    heads: int = setting(4, "how many tokens ahead, one head each", 1)
    vocab: int = setting(0, "tokens the drafter can say: those the target says most; 0: all", 0)
    decay: float = setting(0.8, "weight of each head against the one before", 0)
    eight_bits: bool = setting(False, "store matrices as int8")


def medusa_learner(target: LoadedModel, data: SelfData, plan: HeadsPlan, begin: Path | None) -> HeadsLearner:
    """Untrained, or going on from the finished drafter in `begin`."""
    return heads_learner("medusa", MedusaHeads, target, data, plan, begin)


def heads_learner(
    kind: str, make: type[MedusaHeads], target: LoadedModel, data: SelfData, plan: HeadsPlan, begin: Path | None
) -> HeadsLearner:
    net = load_trained(kind, begin, target).float() if begin else new_heads(target, data, plan, make)
    return HeadsLearner(target, drafter_head(net, target), plan, fast(LOSSES[plan.loss], target.device))


def new_heads(target: LoadedModel, data: SelfData, plan: HeadsPlan, make: type[MedusaHeads]) -> MedusaHeads:
    """Untrained: the blocks are zero, so that every head says what the target's own does."""
    config, every = target.model.config.get_text_config(), head_size(target)
    ids = draft_vocabulary(split(data, plan.held_out)[1], plan.vocab or every, every, target.eos_ids)
    shape = HeadsShape(int(config.hidden_size), plan.heads, int(config.num_hidden_layers), len(ids))
    net = make(shape, ids, target_head(target, ids))
    for weight in net.parameters():
        nn.init.zeros_(weight)
    return net.to(target.device)


@dataclass(slots=True)
class HeadsLearner:
    """For independent heads and for those that read each other's tokens."""

    target: LoadedModel
    net: MedusaHeads
    plan: HeadsPlan
    loss: Loss

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.net.shape.layer,)

    @property
    def shape(self) -> dict[str, Any]:
        return self.net.shape.as_dict()

    def stored(self) -> dict[str, Tensor]:
        return packed(self.net.tensors(), self.plan.eight_bits)

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss an answer token, still on the device."""
        scales = [self.plan.decay**number for number in range(self.net.deepest)]
        share = 1.0 / (max(1, batch.answer_tokens) * sum(scales))
        total = torch.zeros((), device=self.target.device)
        for part in parts(batch, self.target.device):
            with self._precision():
                logits, feature, embedded = self.look(part.tokens)
                inside, p = torch.isin(logits.argmax(-1), self.net.ids), logits.index_select(-1, self.net.ids)
            for number, scale in enumerate(scales):  # each by itself: the logits of one head are large enough
                with self._precision():
                    q = self.net.logits(self.state(number, feature, embedded))
                    cost = self.loss(ahead(p, number + 1).flatten(0, 1), q.flatten(0, 1))
                    counts = answers(part, number) & ahead(inside, number + 1)
                    value = scale * share * (cost * counts.flatten()).sum()
                value.backward()
                total += value.detach()
        return total

    @torch.no_grad()
    def look(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target's logits, its last features and the embeddings of the text itself; [B, L, ...]."""
        out = self.target.model(tokens, use_cache=False, output_hidden_states=True)
        dtype = next(self.net.parameters()).dtype
        embedded = self.target.model.get_input_embeddings()(tokens)
        return out.logits, out.hidden_states[self.net.shape.layer].to(dtype), embedded.to(dtype)

    def state(self, number: int, feature: Tensor, embedded: Tensor) -> Tensor:
        """Of a head in each column, [B, L, d]: after the tokens that stand in the text."""
        path = torch.stack([ahead(embedded, 1 + place) for place in range(number + 1)], -2)
        return self.net.state(number, feature, path)

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Acceptance of the first draft token, greedy and drawn, and greedy at each depth of a chain."""
        offered, taken, drawn, count = [0.0] * self.net.deepest, [0.0] * self.net.deepest, 0.0, 0.0
        for part in parts(data, self.target.device):
            with self._precision():
                logits, feature, embedded = self.look(part.tokens)
                choice = logits.argmax(-1)
                alive = torch.ones_like(choice, dtype=torch.bool)  # the heads before were right
                for number in range(self.net.deepest):
                    q = self.net.logits(self.state(number, feature, embedded)).float()
                    wanted = answers(part, number)
                    if number == 0:
                        p = ahead((logits[..., self.net.ids].float() - log_total(logits)).exp(), 1)
                        drawn += float((torch.minimum(p, q.softmax(-1)).sum(-1) * wanted).sum())
                        count += float(wanted.sum())
                    offered[number] += float((alive & wanted).sum())
                    alive = alive & (self.net.ids[q.argmax(-1)] == ahead(choice, number + 1))
                    taken[number] += float((alive & wanted).sum())
        rates = tuple(round(t / max(o, 1.0), 4) for t, o in zip(taken, offered, strict=True))
        return Point(0, 0.0, rates[0], round(drawn / max(count, 1.0), 4), depths=rates)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.target.device.type == "cuda" else nullcontext()


def ahead(x: Tensor, places: int) -> Tensor:
    """[B, L, ...]: at each place what stands so many places on. The last ones get the first, and never count."""
    return x.roll(-places, dims=1)


def answers(part: SelfData, number: int) -> Tensor:
    """In which columns head `number` says a token of an answer, [B, L]: the one at u + 2 + number."""
    return nn.functional.pad(part.roles[:, 2 + number :] == ANSWER, (0, 2 + number))
