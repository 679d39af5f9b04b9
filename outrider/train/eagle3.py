"""Training an EAGLE-3 drafter: the frozen target's features in, its next-token law as the goal, several steps unrolled.

arXiv 2503.01840 (training-time test); soft targets on text the target wrote itself. Features are computed as they are
needed and never stored. Column u reads the features at u and the token at u + 1 and says the law of the token at u + 2.
In unrolled step s the state of column u is the output of step s - 1 at column u - 1, and the column sees what it would
see when drafting: true features up to u - s + 1, then one own state of each step between, on its diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.draft.eagle3_layer import Eagle3Layer, Eagle3Shape
from outrider.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import DraftCard, packed, write_drafter
from outrider.recipes.trained import load_eagle3
from outrider.train.dialogue import ANSWER
from outrider.train.loop import LoopPlan, Point, Progress, fast, finish, parts, prepare, split, train
from outrider.train.losses import LOSSES, Loss
from outrider.train.selfdata import SelfData

KIND = "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Plan(LoopPlan):
    loss: str = "kl"
    layers: tuple[int, ...] = ()  # empty: the paper's code's, low, middle and high
    vocab: int = 16_384  # the tokens the target says most
    intermediate: int = 0  # of the layer's MLP; 0: the target's
    unroll: int = 6
    decay: float = 0.8  # weight of each step against the one before
    eight_bits: bool = False  # store matrices as int8


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
    config = target.model.config.get_text_config()
    total, hidden, heads = int(config.num_hidden_layers), int(config.hidden_size), int(config.num_attention_heads)
    layers = plan.layers or default_layers(total)
    if not all(0 <= layer <= total for layer in layers):
        raise InputError(f"layers {layers}: the target's features are 0..{total}")
    head = target.model.get_output_embeddings().weight
    ids = draft_vocabulary(split(data, plan.held_out)[1], plan.vocab, len(head), target.eos_ids)
    shape = Eagle3Shape(
        hidden, heads, int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or hidden // heads),
        plan.intermediate or int(getattr(config, "intermediate_size", None) or 4 * hidden),
        layers, len(ids), float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)),
    )  # fmt: skip
    torch.manual_seed(plan.seed)
    net = Eagle3Layer(shape, ids)
    for name, weight in net.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.02 if "o_proj" not in name and "down_proj" not in name else 0.01)
    net.lm_head.weight.data.copy_(head[ids.to(head.device)].float())
    for weight, size in zip(net.fc.weight.data.split(hidden, dim=1), _sizes(target, data, layers), strict=True):
        # Features are tens large; a state as large would drown what the layer adds to it.
        weight.add_(torch.eye(hidden) / len(layers)).div_(size)
    return net.to(target.device)


@torch.no_grad()
def _sizes(target: LoadedModel, data: SelfData, layers: tuple[int, ...]) -> list[float]:
    """The usual size of a value in each layer's features; the median, since a first token's can be huge."""
    part = next(parts(SelfData(data.tokens[:4], data.roles[:4]), target.device))
    states = target.model(part.tokens, use_cache=False, output_hidden_states=True).hidden_states
    return [float(states[layer].float().square().mean(-1).sqrt().median()) or 1.0 for layer in layers]


@dataclass(slots=True)
class Eagle3Learner:
    target: LoadedModel
    net: Eagle3Layer
    plan: Eagle3Plan
    loss: Loss

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss an answer token, still on the device."""
        scales = [self.plan.decay**step for step in range(self.plan.unroll)]
        share = 1.0 / (max(1, batch.answer_tokens) * sum(scales))
        total = torch.zeros((), device=self.target.device)
        for part in parts(batch, self.target.device):
            value = torch.zeros((), device=self.target.device)
            with self._precision():
                p, inside, steps = self._rows(part)
                for scale, (q, wanted) in zip(scales, steps, strict=True):
                    value = value + scale * (self.loss(p, q) * (wanted & inside)).sum()
            (value * share).backward()
            total += value.detach() * share
        return total

    def _rows(self, part: SelfData) -> tuple[Tensor, Tensor, Iterator[tuple[Tensor, Tensor]]]:
        """The target's logits over the draft vocabulary, where its choice is among them, and each step's rows.

        All are [rows] or [rows, vocabulary], a row for each column of each sequence; a step says which rows count.
        """
        logits, embedded, state = look(self.target, self.net, part.tokens)
        inside = following(torch.isin(logits.argmax(-1), self.net.ids))
        p = following(logits.index_select(-1, self.net.ids))
        wanted = answers(part)

        def steps() -> Iterator[tuple[Tensor, Tensor]]:
            for number, after in enumerate(unrolled(self.net, embedded, state, self.plan.unroll)):
                valid = wanted.clone()
                valid[:, :number] = False  # a column whose chain would begin before the text
                yield self.net.logits(after).flatten(0, 1), valid.flatten()

        return p.flatten(0, 1), inside.flatten(), steps()

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Acceptance of the first draft token, greedy and drawn, and greedy at each depth of a chain."""
        offered, taken, drawn, count = [0.0] * self.plan.unroll, [0.0] * self.plan.unroll, 0.0, 0.0
        for part in parts(data, self.target.device):
            with self._precision():
                logits, embedded, state = look(self.target, self.net, part.tokens)
                choice, wanted = following(logits.argmax(-1)), answers(part)
                alive = torch.ones_like(wanted)  # the chain that comes to this column was right so far
                for number, after in enumerate(unrolled(self.net, embedded, state, self.plan.unroll)):
                    q = self.net.logits(after).float()
                    if number == 0:
                        p = following((logits[..., self.net.ids].float() - _total(logits)).exp())
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


def _total(logits: Tensor) -> Tensor:
    return torch.stack([row.float().logsumexp(-1, keepdim=True) for row in logits])  # row by row: they are large


def look(target: LoadedModel, net: Eagle3Layer, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logits at each place of a text, the embedding of the next token and the fused features; [B, L, ...].

    No gradient reaches the target. The last column has no next token; it is there for an even length and never counts.
    """
    with torch.no_grad():
        out = target.model(tokens, use_cache=False, output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer] for layer in net.shape.layers], -1)
        embedded = target.model.get_input_embeddings()(following(tokens))
    return out.logits, embedded, net.fuse(features.to(net.fc.weight.dtype))


def unrolled(net: Eagle3Layer, embedded: Tensor, state: Tensor, steps: int) -> Iterator[Tensor]:
    """The layer's output in each step, [B, T, d]: first from the true states, then from its own, one column later."""
    columns = state.shape[1]
    positions = torch.arange(columns, device=state.device)[None].expand(len(state), -1)
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of later steps, each moved to the column that sees them
    first: tuple[Tensor, Tensor] | None = None
    for _ in range(steps):
        q, k, v = net.project(embedded, state, positions)
        if first is None:
            first = k, v
        else:
            own = [(shifted(keys, 1), shifted(values, 1)) for keys, values in own] + [(k, v)]
        state = net.finish(state, attend(q, first, own))
        yield state
        state = shifted(state, 1)


def shifted(x: Tensor, columns: int) -> Tensor:
    """[..., T, D] moved to later columns; nothing comes into the first."""
    return nn.functional.pad(x, (0, 0, columns, 0))[..., : x.shape[-2], :]


def attend(q: Tensor, first: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, Hq, T, D]: column u sees the first step's columns up to u less the later steps, and its own key of each."""
    keys, values = first
    _, heads, columns, dim = q.shape
    with torch.autocast(q.device.type, enabled=False):  # half-precision weights are enough, and half the memory
        q = q.unflatten(1, (-1, heads // keys.shape[1])) * dim**-0.5  # [B, Hk, G, T, D]
        scores = q @ keys[:, :, None].transpose(-1, -2)  # [B, Hk, G, T, T]
        hidden = torch.ones(columns, columns, dtype=torch.bool, device=q.device).triu(1 - len(own))
        scores = scores.masked_fill(hidden, -math.inf)
        beside = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]  # [B, Hk, G, T, 1]
        highest = torch.stack([scores.amax(-1, keepdim=True), *beside]).amax(0).detach()
        weights = (scores - highest).exp()
        total, out = weights.sum(-1, keepdim=True), weights @ values[:, :, None]
        for score, (_, v) in zip(beside, own, strict=True):  # one softmax over both kinds, without joining them
            weight = (score - highest).exp()
            total, out = total + weight, out + weight * v[:, :, None]
        out = out / total
        return out.flatten(1, 2)


def train_eagle3(
    target: LoadedModel, data: SelfData, plan: Eagle3Plan, folder: Path, *,
    on_progress: Progress = lambda step, of, point: None,
    save_every: float = 120.0,  # seconds
    measure_every: int = 100,  # steps
    recipe: dict[str, Any] | None = None,  # said in the card besides the plan
    licence: str = "",
    begin: Path | None = None,  # a finished drafter to go on from, instead of an untrained one
) -> tuple[Eagle3Layer, list[Point]]:  # fmt: skip
    """Train, resuming what `folder` holds, and leave the finished drafter there with its curve."""
    prepare(plan, data, folder)
    net = load_eagle3(begin, target).float() if begin else new_layer(target, data, plan)
    learner = Eagle3Learner(target, net, plan, fast(LOSSES[plan.loss], target.device))
    about = {"kind": KIND, "target": target.fingerprint, "shape": net.shape.as_dict(), "begin": str(begin or "")}
    curve = train(
        learner, data, plan, folder, about,
        on_progress=on_progress, save_every=save_every, measure_every=measure_every,
    )  # fmt: skip
    last = curve[-1]
    card = DraftCard(
        target.name, target.fingerprint, net.shape.layers, {**asdict(plan), **(recipe or {})},
        {"held-out": {"greedy": last.greedy, "sampled": last.sampled, "greedy by depth": last.depths}}, licence, KIND,
        net.shape.as_dict(),
    )  # fmt: skip
    save_eagle3(folder, net, card, plan.eight_bits)
    finish(folder, curve)
    return net, curve


def save_eagle3(folder: Path, net: Eagle3Layer, card: DraftCard, eight_bits: bool = False) -> None:
    """Changes the folder."""
    write_drafter(folder, packed(net.tensors(), eight_bits), card)
