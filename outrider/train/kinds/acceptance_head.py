"""Training an acceptance head: from a frozen drafter's hidden states, how likely the target accepts what it drafted.

SpecDec++ (arXiv 2405.19715). On text the target wrote, the drafter draws a token Y at every place; the chance
min(1, p / q) that the target accepts it is the goal, soft. The drafter then reads a text in which most tokens are those
it drew and a share r are the true ones, and the head learns from its states at the drawn ones. A one-layer drafter
reads them in its unrolled steps, where it will have drafted them. A rejection weighs w times as much as an acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import LAYERS, digest_of, load_draft, packed, read_card
from outrider.models.kept import find_drafter
from outrider.models.networks.acceptance import AcceptanceHead, AcceptanceShape
from outrider.models.trained import ACCEPTANCE, load_eagle3, load_trained
from outrider.train.kinds.eagle3 import following, look, unrolled
from outrider.train.loop import LoopPlan, Point, parts, setting
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

EAGLE3 = "eagle3"
BINS = 10  # of a calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePlan(LoopPlan):
    loss: str = setting("ce", "not used: the loss is the weighted cross-entropy of acceptance")
    drafter: str = setting("", "whose drafts it judges: a draft-model or eagle3 folder or name; empty: the draft model")
    blocks: int = setting(3, "residual blocks (L)", 0)
    shared: bool = setting(False, "one block's weights in all of them, as in the published heads")
    weight: float = setting(6.0, "of a rejection against an acceptance (w)", 0)
    mixed: float = setting(0.15, "share of drawn tokens that the true ones take the place of (r)", 0)
    temperature: float = setting(1.0, "at which both models are read; 0: of greedy drafts", 0)
    unroll: int = setting(8, "eagle3: steps, the first of which drafts from the text", 2)


@dataclass(frozen=True, slots=True)
class Judged:
    """Drawn tokens: the drafter's states at them and the chance that the target accepts each."""

    states: Tensor  # [n, d]
    accepted: Tensor  # [n]


Judge = Callable[[SelfData, torch.Generator], Iterator[Judged]]


def acceptance_learner(
    target: LoadedModel, data: SelfData, plan: AcceptancePlan, begin: Path | None
) -> AcceptanceLearner:  # fmt: skip
    """Untrained, or going on from the finished head in `begin`."""
    folder = find_drafter(target, LAYERS, plan.drafter)
    if folder is None:
        raise InputError("no draft model is kept or shipped for this model; name a drafter with --drafter")
    kind, layers = (card := read_card(folder)).kind, card.layers
    if kind == EAGLE3:
        net = load_eagle3(folder, target)
        judge: Judge = ChainJudge(target, net, plan).judged
        hidden = net.shape.hidden
    elif kind == LAYERS:
        draft = load_draft(folder, target)
        judge = ModelJudge(target, draft, plan).judged
        hidden = int(draft.config.get_text_config().hidden_size)
    else:
        raise InputError(f"{folder}: a head judges drafters of kind {LAYERS} or {EAGLE3}, not {kind}")
    shape = AcceptanceShape(hidden, kind, digest_of(folder), plan.blocks, plan.shared)
    return AcceptanceLearner(target, _head(shape, plan, target, begin), plan, judge, layers)


def _head(shape: AcceptanceShape, plan: AcceptancePlan, target: LoadedModel, begin: Path | None) -> AcceptanceHead:
    if begin is not None:
        return load_trained(ACCEPTANCE, begin, target)
    torch.manual_seed(plan.seed)
    return AcceptanceHead(shape).to(target.device)


@dataclass(slots=True)
class AcceptanceLearner:
    target: LoadedModel
    net: AcceptanceHead
    plan: AcceptancePlan
    judge: Judge
    layers: tuple[int, ...]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    @property
    def shape(self) -> dict[str, Any]:
        return self.net.shape.as_dict()

    def stored(self) -> dict[str, Tensor]:
        return packed(self.net.tensors(), False)

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time."""
        seen = self._judged(batch)
        share = 1.0 / max(float(sum(_weights(each.accepted, self.plan.weight).sum() for each in seen)), 1e-9)
        total = torch.zeros((), device=self.target.device)
        for each in seen:
            value = weighted(self.net.odds(each.states), each.accepted, self.plan.weight).sum() * share
            value.backward()
            total += value.detach()
        return total

    def _judged(self, data: SelfData) -> list[Judged]:
        found: list[Judged] = []
        for part in parts(data, self.target.device):
            # the draws are those of the text, whenever it comes: a run that goes on makes the same
            noise = torch.Generator(part.tokens.device).manual_seed(self.plan.seed + int(part.tokens.sum()))
            with torch.no_grad(), _precision(self.target):
                found += self.judge(part, noise)
        return found

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Of drawn tokens: the share that is accepted, and the share that the head foresees."""
        accepted, said = self.told(data)
        return Point(0, 0.0, round(float(accepted.mean()), 4), round(float(said.mean()), 4))

    @torch.no_grad()
    def told(self, data: SelfData) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of every drawn token: its chance to be accepted, and what the head says of it."""
        seen = [(each.accepted.double().cpu(), self.net(each.states).double().cpu()) for each in self._judged(data)]
        accepted, said = (torch.cat(list(column)).numpy() for column in zip(*seen, strict=True))
        return accepted, said


def weighted(odds: Tensor, accepted: Tensor, weight: float) -> Tensor:
    """Of each row: cross-entropy with a soft goal, the rejected part of it `weight` times."""
    return -weight * (1 - accepted) * logsigmoid(-odds) - accepted * logsigmoid(odds)


def _weights(accepted: Tensor, weight: float) -> Tensor:
    return weight * (1 - accepted) + accepted


def calibration(accepted: NDArray[np.float64], said: NDArray[np.float64]) -> list[tuple[float, float, int]]:
    """By tenths of what was said: its mean, the share accepted, and how many tokens that were."""
    at = np.minimum((said * BINS).astype(int), BINS - 1)
    return [
        (float(said[at == bin].mean()), float(accepted[at == bin].mean()), int((at == bin).sum()))
        for bin in range(BINS)
        if (at == bin).any()
    ]


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """Of a draft model."""

    target: LoadedModel
    draft: Any
    plan: AcceptancePlan

    def judged(self, part: SelfData, noise: torch.Generator) -> Iterator[Judged]:
        p = self.target.model(part.tokens, use_cache=False).logits
        q = self.draft(part.tokens, use_cache=False).logits
        drawn, accepted = drawn_from(q, p, self.plan.temperature, noise)  # row u is about token u + 1
        read = self._chosen(part, noise)
        mixed = part.tokens.clone()
        mixed[:, 1:] = torch.where(read[:, 1:], drawn[:, :-1], part.tokens[:, 1:])
        out = self.draft(mixed, use_cache=False, output_hidden_states=True)
        yield Judged(out.hidden_states[-1][:, 1:][read[:, 1:]], accepted[:, :-1][read[:, 1:]])

    def _chosen(self, part: SelfData, noise: torch.Generator) -> Tensor:
        """[B, L]: tokens of an answer that drawn ones take the place of."""
        return _kept(part.roles == ANSWER, self.plan.mixed, noise)


@dataclass(frozen=True, slots=True)
class ChainJudge:
    """Of a one-layer drafter over the target's features, in chains."""

    target: LoadedModel
    net: Any
    plan: AcceptancePlan

    def judged(self, part: SelfData, noise: torch.Generator) -> Iterator[Judged]:
        """Column u reads the token at u + 1: in a later step the one drawn a step and a column before."""
        p, embedded, state = look(self.target, self.net, part.tokens)
        text = following(part.tokens)
        answers = nn.functional.pad(part.roles[:, 1:] == ANSWER, (0, 1))
        columns = torch.arange(text.shape[1], device=text.device)
        read = accepted = torch.zeros(())

        def next_tokens(state: Tensor) -> Tensor:
            """From states that were moved a column on."""
            nonlocal read, accepted
            q = self.net.logits(state)
            drawn, accepted = drawn_from(q, p, self.plan.temperature, noise, self.net.ids)
            read = _kept(answers, self.plan.mixed, noise)
            tokens = torch.where(read, drawn, text)
            return self.target.model.get_input_embeddings()(tokens).to(embedded.dtype)

        for number, after in enumerate(unrolled(self.net, embedded, state, self.plan.unroll, read=next_tokens)):
            if number:
                counted = read & (columns >= number)
                yield Judged(after[counted], accepted[counted])


def drawn_from(
    q: Tensor, p: Tensor, temperature: float, noise: torch.Generator, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A token from each row of the drafter's logits [B, L, draft vocabulary], and its chance of being accepted."""
    drawn, accepted = [], []
    for of_draft, of_target in zip(q, p, strict=True):  # a sequence at a time: rows of a vocabulary are large
        if temperature == 0:
            at = of_draft.argmax(-1)
            tokens = at if ids is None else ids[at]
            accepted.append((of_target.argmax(-1) == tokens).float())
        else:
            probs = (of_draft.float() / temperature).softmax(-1)
            at = torch.multinomial(probs, 1, generator=noise)[:, 0]
            tokens = at if ids is None else ids[at]
            wanted = (of_target.float() / temperature).softmax(-1).gather(-1, tokens[:, None])[:, 0]
            accepted.append((wanted / probs.gather(-1, at[:, None])[:, 0]).clamp(max=1.0))
        drawn.append(tokens)
    return torch.stack(drawn), torch.stack(accepted)


def _kept(answers: Tensor, mixed: float, noise: torch.Generator) -> Tensor:
    """Of these places, all but a share."""
    return answers & (torch.rand(answers.shape, generator=noise, device=answers.device) >= mixed)


def _precision(target: LoadedModel) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if target.device.type == "cuda" else nullcontext()
