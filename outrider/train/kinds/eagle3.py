"""Training an EAGLE-3 drafter: the frozen target's features in, what it says next as the goal, several steps unrolled.

arXiv 2503.01840 (training-time test); soft targets on text the target wrote itself. Features are computed as they are
needed and never stored. Column u reads the features at u and the token at u + 1 and guesses the token at u + 2. In
unrolled step s the state of column u is the output of step s - 1 at column u - 1, and the column sees what it would see
when drafting: true features up to u - s + 1, then one state of the layer's for each step between, on its diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import packed
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape, FeatureLayer
from outrider.models.trained import load_eagle3
from outrider.train.attention import attend
from outrider.train.loop import LOSS_HELP, LoopPlan, Point, fast, parts, setting, split
from outrider.train.losses import LOSSES, Loss, topk_loss
from outrider.train.reshape.widen import widened
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData

VOCAB = 16_384  # tokens of a new drafter
TOPK_HELP = "weight of the cross-entropy over the target's likeliest tokens (HASS: 1)"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Plan(LoopPlan):
    loss: str = setting("kl", LOSS_HELP)
    layers: tuple[int, ...] = setting((), "target layers whose inputs are read, such as 2,15,27; empty: the paper's")
    vocab: int = setting(0, f"tokens the drafter can say: those the target says most; 0: {VOCAB:,}, or as it was", 0)
    intermediate: int = setting(0, "width of its MLP; 0: the target's, or as it was", 0)
    unroll: int = setting(6, "steps trained on its own states", 1)
    decay: float = setting(0.8, "weight of each step against the one before", 0)
    topk_weight: float = setting(0.0, TOPK_HELP, 0)
    topk: int = setting(10, "how many those are", 1)
    eight_bits: bool = setting(False, "store matrices as int8")


def eagle3_learner(target: LoadedModel, data: SelfData, plan: Eagle3Plan, begin: Path | None) -> Eagle3Learner:
    """Untrained, or going on from the finished drafter in `begin`, made larger where the plan says so."""
    if begin is None:
        net = new_layer(target, data, plan)
    else:
        net = widened(load_eagle3(begin, target).float(), target, data, plan.vocab, plan.intermediate)
    return Eagle3Learner(target, net, plan, fast(LOSSES[plan.loss], target.device))


def default_layers(total: int) -> tuple[int, ...]:
    """Low, middle, high; `hidden_states[i]` is the input of 0-based layer i."""
    return tuple(sorted({min(2, total - 1), total // 2, max(total - 3, 0)}))


def draft_vocabulary(data: SelfData, size: int, total: int, always: frozenset[int]) -> Tensor:
    """The tokens said most in answers, of equals the lower id, and those that end a text; rising."""
    said = data.tokens[data.roles == ANSWER].long()
    counts = torch.bincount(said, minlength=total).double()
    counts[sorted(always)] = math.inf
    return torch.sort(counts, descending=True, stable=True).indices[: min(size, total)].sort().values


def new_layer(target: LoadedModel, data: SelfData, plan: Eagle3Plan) -> Eagle3Layer:
    """Untrained: the head begins as the target's, the fusion as the mean of its features, each made of size one."""
    total = int(target.model.config.get_text_config().num_hidden_layers)
    layers = plan.layers or default_layers(total)
    if not all(0 <= layer <= total for layer in layers):
        raise InputError(f"layers {layers}: the target's features are 0..{total}")
    head = target.model.get_output_embeddings().weight
    ids = draft_vocabulary(split(data, plan.held_out)[1], plan.vocab or VOCAB, len(head), target.eos_ids)
    net = initialised(Eagle3Layer(layer_shape(target, layers, len(ids), plan.intermediate), ids), plan.seed)
    net.lm_head.weight.data.copy_(head[ids.to(head.device)].float())
    fuse_evenly(net.fc, target, data, layers)
    return net.to(target.device)


def fuse_evenly(fusion: nn.Linear, target: LoadedModel, data: SelfData, layers: tuple[int, ...]) -> None:
    """Changes the fusion: it begins near the mean of the features, each made of size one."""
    hidden = fusion.out_features
    for weight, size in zip(fusion.weight.data.split(hidden, dim=1), _sizes(target, data, layers), strict=True):
        # Features are tens large; a state as large would drown what the layer adds to it.
        weight.add_(torch.eye(hidden) / len(layers)).div_(size)


def layer_shape(target: LoadedModel, layers: tuple[int, ...], vocab: int, intermediate: int) -> Eagle3Shape:
    """A layer of the target's own sizes, which reads these features."""
    config = target.model.config.get_text_config()
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    return Eagle3Shape(
        hidden, heads, int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate or int(getattr(config, "intermediate_size", None) or 4 * hidden),
        layers, vocab, float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)),
    )  # fmt: skip


def initialised(net: Module, seed: int, spread: float = 0.02) -> Module:
    """Small random matrices; smaller those that add to what flows past."""
    torch.manual_seed(seed)
    for name, weight in net.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=spread if "o_proj" not in name and "down_proj" not in name else spread / 2)
    return net


@torch.no_grad()
def _sizes(target: LoadedModel, data: SelfData, layers: tuple[int, ...]) -> list[float]:
    """The usual size of a value in each layer's features; the median, since a first token's can be huge."""
    part = next(parts(SelfData(data.tokens[:4], data.roles[:4]), target.device))
    states = target.model(part.tokens, use_cache=False, output_hidden_states=True).hidden_states
    return [float(states[layer].float().square().mean(-1).sqrt().median()) or 1.0 for layer in layers]


@dataclass(slots=True)
class Eagle3Learner:
    """Any one-layer drafter over features; the other kinds of this family say what costs besides, and what is true."""

    target: LoadedModel
    net: Any  # an Eagle3Layer, or one with its methods
    plan: Any
    loss: Loss
    detached = False  # whether gradients stop between unrolled steps

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.shape.layers

    @property
    def shape(self) -> dict[str, Any]:
        return self.net.shape.as_dict()

    @property
    def depths(self) -> int:
        """How deep acceptance is measured."""
        return self.plan.unroll

    def stored(self) -> dict[str, Tensor]:
        return packed(self.net.tensors(), self.plan.eight_bits)

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss an answer token, still on the device."""
        scales = [self.plan.decay**step for step in range(self.plan.unroll)]
        share = 1.0 / (max(1, batch.answer_tokens) * sum(scales))
        total = torch.zeros((), device=self.target.device)
        for part in parts(batch, self.target.device):
            value = torch.zeros((), device=self.target.device)
            with self._precision():
                logits, embedded, state = look(self.target, self.net, part.tokens)
                wanted = answers(part)
                rows = wanted.flatten().nonzero()[:, 0]  # only what counts is taken to the vocabulary
                column = rows % wanted.shape[1]
                told = logits.flatten(0, 1)[rows + 1]
                inside = torch.isin(told.argmax(-1), self.net.ids)
                p, goal = told.index_select(-1, self.net.ids), state.flatten(0, 1)[rows + 1]
                steps = unrolled(self.net, embedded, self.seen(state, part), self.plan.unroll, self.detached)
                for number, (scale, after) in enumerate(zip(scales, steps, strict=True)):
                    cost = self.cost(p, inside, after.flatten(0, 1)[rows], goal)
                    # not a column whose chain would begin before the text
                    value = value + scale * (cost * (column >= number)).sum()
            (value * share).backward()
            total += value.detach() * share
        return total

    def seen(self, state: Tensor, part: SelfData) -> Tensor:
        """The true states as training shows them, [B, L, d]."""
        return state

    def cost(self, p: Tensor, inside: Tensor, after: Tensor, goal: Tensor) -> Tensor:
        """Of each row's guess `after`, [rows]: from the target's logits over the draft vocabulary, where its choice is
        among them, and its true state one column later."""
        return self.distribution_cost(p, self.net.logits(after), 1.0) * inside

    def distribution_cost(self, p: Tensor, q: Tensor, weight: float) -> Tensor:
        """Of the drafter's logits against the target's: the loss times its weight, and HASS's term where asked for."""
        total = weight * self.loss(p, q)
        if self.plan.topk_weight:
            total = total + self.plan.topk_weight * topk_loss(p, q, self.plan.topk)
        return total

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Acceptance of the first draft token, greedy and drawn, and greedy at each depth of a chain."""
        offered, taken, drawn, count = [0.0] * self.depths, [0.0] * self.depths, 0.0, 0.0
        for part in parts(data, self.target.device):
            with self._precision():
                logits, embedded, state = look(self.target, self.net, part.tokens)
                choice, wanted = following(logits.argmax(-1)), answers(part)
                alive = torch.ones_like(wanted)  # the chain that comes to this column was right so far
                for number, after in enumerate(unrolled(self.net, embedded, state, self.depths)):
                    q = self.net.logits(after).float()
                    if number == 0:
                        p = following((logits[..., self.net.ids].float() - log_total(logits)).exp())
                        drawn += float((torch.minimum(p, q.softmax(-1)).sum(-1) * wanted).sum())
                        count += float(wanted.sum())
                    else:
                        alive = shifted(alive[..., None], 1)[..., 0]
                    hit = self.net.ids[q.argmax(-1)] == choice
                    offered[number] += float((alive & wanted).sum())
                    alive = alive & hit
                    taken[number] += float((alive & wanted).sum())
        rates = tuple(round(t / max(o, 1.0), 4) for t, o in zip(taken, offered, strict=True))
        return Point(0, 0.0, rates[0], round(drawn / max(count, 1.0), 4), depths=rates)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.target.device.type == "cuda" else nullcontext()


def answers(part: SelfData) -> Tensor:
    """Which columns say a token of an answer, [B, L]: column u says token u + 2, so the last two say none."""
    return nn.functional.pad(part.roles[:, 2:] == ANSWER, (0, 2))


def following(x: Tensor) -> Tensor:
    """[B, L, ...]: at each place what stands at the next. The last gets the first, and never counts."""
    return x.roll(-1, dims=1)


def log_total(logits: Tensor) -> Tensor:
    """[B, L, 1]: what normalises them."""
    return torch.stack([row.float().logsumexp(-1, keepdim=True) for row in logits])  # row by row: they are large


def look(target: LoadedModel, net: FeatureLayer, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logits at each place of a text, the embedding of the next token and the fused features; [B, L, ...].

    No gradient reaches the target. The last column has no next token; it is there for an even length and never counts.
    """
    with torch.no_grad():
        out = target.model(tokens, use_cache=False, output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer] for layer in net.shape.layers], -1)
        embedded = target.model.get_input_embeddings()(following(tokens))
    dtype = net.fc.weight.dtype
    return out.logits, embedded.to(dtype), net.fuse(features.to(dtype))


def unrolled(
    net: FeatureLayer, embedded: Tensor, state: Tensor, steps: int, detached: bool = False,
    read: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """The layer's output in each step, [B, T, d]: first from the true states, then from its own, one column later.

    `detached`: no gradient flows from a step into those before it. `read`: of the states that a step goes on from, the
    embeddings that it reads beside them, where they are not those of the text.
    """
    columns = state.shape[1]
    positions = torch.arange(columns, device=state.device)[None].expand(len(state), -1)
    later: list[tuple[Tensor, Tensor]] = []  # keys and values of later steps, each moved to the column that sees them
    first: tuple[Tensor, Tensor] | None = None
    for number in range(steps):
        if read is not None and number:
            embedded = read(state)
        state = net.enter(embedded, state)
        q, k, v = net.project(embedded, state, positions)
        if first is None:
            first = k, v
        else:
            later = [(shifted(keys, 1), shifted(values, 1)) for keys, values in later] + [(k, v)]
        state = net.finish(state, attend(q, first, later))
        yield state
        state = shifted(state.detach() if detached else state, 1)


def shifted(x: Tensor, columns: int) -> Tensor:
    """[..., T, D] moved to later columns; nothing comes into the first."""
    return nn.functional.pad(x, (0, 0, columns, 0))[..., : x.shape[-2], :]
