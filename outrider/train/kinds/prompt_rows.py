"""Training the prompts of parallel prompt decoding: vectors that make the frozen target say what it would say later.

arXiv 2405.18628. Behind some columns t of the text stands a chain of prompts; the i-th is held against the target's
distribution of the token at t + 1 + i, which the target gave when it had seen the text up to there. The text runs once
without gradients, the prompts behind its keys and values; nothing but the vectors is trained, so minutes suffice.
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
from outrider.models.networks.prompt_rows import PromptRows, PromptShape
from outrider.models.trained import load_trained
from outrider.runtime.support import cache_argument
from outrider.train.loop import LOSS_HELP, LoopPlan, Point, fast, parts, setting
from outrider.train.losses import LOSSES, Loss
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

MEASURED = 64  # columns of a sequence that are measured behind


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRowsPlan(LoopPlan):
    lr: float = setting(1e-2, "highest learning rate", 1e-9)
    warmup: float = setting(0.0, "share of the steps in which the rate rises", 0)
    weight_decay: float = setting(0.0, "of AdamW", 0)
    loss: str = setting("kl", LOSS_HELP)
    prompts: int = setting(3, "how many tokens ahead, one row each", 1)
    members: int = setting(1, "vectors of a prompt, run apart and averaged", 1)
    anchors: int = setting(32, "columns of a sequence that have prompts behind them", 1)
    decay: float = setting(0.8, "weight of each prompt against the one before", 0)
    ranks: int = setting(10, "of a guess, whose acceptance is measured for the tree", 1)


def prompt_rows_learner(
    target: LoadedModel, data: SelfData, plan: PromptRowsPlan, begin: Path | None
) -> PromptRowsLearner:  # fmt: skip
    """Untrained, the embeddings of some tokens; or going on from the finished drafter in `begin`."""
    if begin is not None:
        net = load_trained("ppd", begin, target).float()
    else:
        words = target.model.get_input_embeddings().weight
        net = PromptRows(PromptShape(words.shape[1], plan.prompts, plan.members, plan.ranks)).to(target.device)
        make = torch.Generator().manual_seed(plan.seed)
        some = torch.randint(len(words), (plan.members, plan.prompts), generator=make)
        net.vectors.data.copy_(words.detach()[some.to(words.device)])
    return PromptRowsLearner(target, net.requires_grad_(True), plan, fast(LOSSES[plan.loss], target.device))


@dataclass(slots=True)
class PromptRowsLearner:
    target: LoadedModel
    net: PromptRows
    plan: PromptRowsPlan
    loss: Loss

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    @property
    def shape(self) -> dict[str, Any]:
        return self.net.shape.as_dict()

    def stored(self) -> dict[str, Tensor]:
        return packed(self.net.tensors(), False)

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss a column, still on the device."""
        scales = torch.tensor([self.plan.decay**i for i in range(self.net.deepest)], device=self.target.device)
        total = torch.zeros((), device=self.target.device)
        for part in parts(batch, self.target.device):
            with self._precision():
                columns = self.some(part)
                logits, cache = self.read(part.tokens)
                said = self.ahead(columns, cache)  # [B, K, prompts, V]
                goal = at(logits, later(columns, self.net.deepest))
            cost = self.loss(goal.flatten(0, 2), said.flatten(0, 2)).view(said.shape[:3])
            weight = scales * answers(part, columns, self.net.deepest)
            value = (cost * weight).sum() / (scales.sum() * columns.shape[1] * len(batch.tokens))
            value.backward()
            total += value.detach()
        return total

    def some(self, part: SelfData) -> Tensor:
        """Columns [B, K] with prompts behind them: a function of the text, so that a resumed run has the same."""
        room = part.tokens.shape[1] - self.net.deepest - 1
        make = torch.Generator().manual_seed(self.plan.seed + int(part.tokens.sum()))
        count = min(self.plan.anchors, room)
        chosen = torch.stack([torch.randperm(room, generator=make)[:count] for _ in part.tokens])
        return chosen.to(part.tokens.device)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """The target's logits of the text, and its keys and values."""
        out = self.target.model(tokens, use_cache=True)
        return out.logits, out.past_key_values

    def ahead(self, columns: Tensor, cache: Any) -> Tensor:
        """What the prompts behind these columns say, [B, K, prompts, V]; the members' mean. Changes the cache."""
        members, prompts, _ = self.net.vectors.shape
        batch, count = columns.shape
        length, device = cache.get_seq_length(), columns.device
        chain = torch.arange(count * members, device=device).repeat_interleave(prompts)
        offset = torch.arange(prompts, device=device).repeat(count * members)
        anchor = columns.repeat_interleave(members * prompts, 1)  # [B, rows]
        text = torch.arange(length, device=device) <= anchor[..., None]
        chained = (chain[:, None] == chain) & (offset[:, None] >= offset)
        sees = torch.cat([text, chained.expand(batch, -1, -1)], -1)[:, None]
        if self.target.model.config._attn_implementation != "sdpa":
            sees = torch.zeros(sees.shape, dtype=self.net.vectors.dtype, device=device).masked_fill(~sees, -torch.inf)
        rows = self.net.vectors.flatten(0, 1).repeat(count, 1).expand(batch, -1, -1)
        out = self.target.model(
            inputs_embeds=rows.to(self.target.dtype), attention_mask=sees, position_ids=anchor + 1 + offset,
            **{cache_argument(self.target.model): cache},
        )  # fmt: skip
        return out.logits.view(batch, count, members, prompts, -1).mean(2)

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Acceptance of each guess of a chain, the first one drawn as well. Notes how often each rank is right."""
        deepest, ranks = self.net.deepest, self.net.shape.ranks
        counts = torch.zeros(4, deepest)  # chains: offered, taken; drawn and its count
        right, offered = torch.zeros(deepest, ranks), torch.zeros(deepest)
        for part in parts(data, self.target.device):
            with self._precision():
                room = part.tokens.shape[1] - deepest - 1
                spread = torch.linspace(0, room - 1, min(MEASURED, room), device=part.tokens.device).long()
                columns = spread.expand(len(part.tokens), -1)
                logits, cache = self.read(part.tokens)
                said = self.ahead(columns, cache).float()
            places = later(columns, deepest)
            choice, follows = at(logits.argmax(-1), places), at(part.tokens, places + 1)
            guesses = said.topk(ranks, -1).indices
            first = torch.minimum(at(logits, places[..., 0]).float().softmax(-1), said[:, :, 0].softmax(-1)).sum(-1)
            wanted = answers(part, columns, deepest)
            alive = torch.ones(columns.shape, dtype=torch.bool, device=columns.device)  # the guesses before were right
            inside = alive.clone()  # they were among the ranks, and the text went on with them
            counts[2, 0] += float((first * wanted[..., 0]).sum())
            counts[3, 0] += float(wanted[..., 0].sum())
            for depth in range(deepest):
                hit = guesses[:, :, depth] == choice[:, :, depth, None]
                counts[0, depth] += float((alive & wanted[..., depth]).sum())
                alive = alive & hit[..., 0]
                counts[1, depth] += float((alive & wanted[..., depth]).sum())
                here = inside & wanted[..., depth]
                offered[depth] += float(here.sum())
                right[depth] += hit[here].sum(0).cpu()
                inside = inside & hit.any(-1) & (follows[..., depth] == choice[..., depth])
        self.net.rates.copy_(right / offered.clamp(min=1)[:, None])
        rates = tuple(round(float(rate), 4) for rate in counts[1] / counts[0].clamp(min=1))
        return Point(0, 0.0, rates[0], round(float(counts[2, 0] / counts[3, 0].clamp(min=1)), 4), depths=rates)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.target.device.type == "cuda" else nullcontext()


def later(columns: Tensor, count: int) -> Tensor:
    """[B, K, count]: the columns whose rows of the target each prompt is to foresee."""
    return columns[..., None] + torch.arange(1, count + 1, device=columns.device)


def at(values: Tensor, columns: Tensor) -> Tensor:
    """values [B, L, ...] at columns [B, ...]."""
    rows = torch.arange(len(values), device=values.device).view(-1, *[1] * (columns.ndim - 1))
    return values[rows, columns]


def answers(part: SelfData, columns: Tensor, count: int) -> Tensor:
    """[B, K, count]: where the foreseen token is one of an answer."""
    return at(part.roles, later(columns, count) + 1) == ANSWER
