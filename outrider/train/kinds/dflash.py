"""Training a DFlash drafter: blocks of masks at many anchors of a text, filled at once, against what the target says.

arXiv 2602.06036: the target is frozen, places further ahead weigh exp(-(k - 1) / gamma). All blocks of a text go
through the layers in one pass behind the fused features of the text, each as if it were alone (`block_mask`). Goals are
the target's distributions along the text: averaged over the text they teach the same as its tokens would, with less
noise; `--loss ce` comes nearest to the paper's hard labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import packed
from outrider.models.networks.block import Attend, BlockNet, BlockShape, DFlashNet
from outrider.models.trained import load_trained, target_head
from outrider.models.truncate import final_norm
from outrider.train.block_mask import Anchors, block_mask, choose_anchors
from outrider.train.kinds.eagle2 import drafter_head, head_size
from outrider.train.kinds.eagle3 import VOCAB, default_layers, draft_vocabulary, fuse_evenly, initialised, layer_shape
from outrider.train.loop import LOSS_HELP, LoopPlan, Point, fast, parts, setting, split
from outrider.train.losses import LOSSES, Loss
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan(LoopPlan):
    """Settings of all kinds that fill blocks."""

    loss: str = setting("kl", LOSS_HELP)
    vocab: int = setting(0, f"tokens the drafter can say: those the target says most; 0: {VOCAB:,}", 0)
    anchors: int = setting(64, "blocks of a sequence in an update", 1)
    eight_bits: bool = setting(False, "store matrices as int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashPlan(BlockPlan):
    layers: tuple[int, ...] = setting((), "target layers whose inputs are read, such as 2,15,27; empty: as eagle3")
    deep: int = setting(2, "layers of the drafter", 1)
    block: int = setting(8, "tokens of a block, the pending one among them", 2)
    intermediate: int = setting(0, "width of its MLPs; 0: the target's", 0)
    gamma: float = setting(4.0, "depths after which a place weighs a third", 1e-3)


def dflash_learner(target: LoadedModel, data: SelfData, plan: DFlashPlan, begin: Path | None) -> BlockLearner:
    """Untrained, or going on from the finished drafter in `begin`."""
    net = load_trained("dflash", begin, target).float() if begin else new_net(target, data, plan)
    return BlockLearner(target, drafter_head(net, target), plan, fast(LOSSES[plan.loss], target.device))


def new_net(target: LoadedModel, data: SelfData, plan: DFlashPlan) -> DFlashNet:
    """Untrained: the fusion begins as the mean of the features, the last norm as the target's."""
    total = int(target.model.config.get_text_config().num_hidden_layers)
    layers = plan.layers or default_layers(total)
    if not all(0 <= layer <= total for layer in layers):
        raise InputError(f"layers {layers}: the target's features are 0..{total}")
    shape, ids = block_shape(target, data, plan, layers, plan.deep, plan.block, plan.intermediate)
    net = initialised(DFlashNet(shape, ids, target_head(target, ids)), plan.seed, shape.hidden**-0.5)
    fuse_evenly(net.fc, target, data, layers)
    with_final_norm(net, target)
    return net.to(target.device)


def block_shape(
    target: LoadedModel, data: SelfData, plan: BlockPlan, layers: tuple[int, ...], deep: int, block: int,
    intermediate: int,
) -> tuple[BlockShape, Tensor]:  # fmt: skip
    """Layers of the target's own sizes, and the tokens that can be said."""
    every, training = head_size(target), split(data, plan.held_out)[1]
    ids = draft_vocabulary(training, plan.vocab or VOCAB, every, target.eos_ids)
    like = layer_shape(target, layers, len(ids), intermediate)
    mask = unsaid(training, every)
    return BlockShape(
        like.hidden, like.heads, like.kv_heads, like.head_dim, like.intermediate, layers, deep, block, mask, len(ids),
        like.theta,
    ), ids  # fmt: skip


def unsaid(data: SelfData, total: int) -> int:
    """The last of the tokens that are said least: its embedding can stand for one to be found."""
    counts = torch.bincount(data.tokens.flatten().long(), minlength=total)
    return int((counts == counts.min()).nonzero()[-1])


def with_final_norm(net: BlockNet, target: LoadedModel) -> None:
    """Changes the last norm into the target's, which its head expects."""
    weight = getattr(final_norm(target.model), "weight", None)
    if weight is not None and weight.shape == net.norm.weight.shape:
        net.norm.weight.data.copy_(weight.detach().float())


@dataclass(slots=True)
class BlockLearner:
    target: LoadedModel
    net: Any  # a DFlashNet
    plan: Any
    loss: Loss

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.shape.layers

    @property
    def shape(self) -> dict[str, Any]:
        return self.net.shape.as_dict()

    def stored(self) -> dict[str, Tensor]:
        return packed(self.net.tensors(), self.plan.eight_bits)

    def weight(self, depth: int) -> float:
        """Of the token at this depth, the first being 0."""
        return math.exp(-depth / self.plan.gamma)

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss a token of full weight, still on the device."""
        chosen = [(part, choose_anchors(part, self.plan.anchors, self.plan.seed)) for part in self._parts(batch)]
        share = 1.0 / max(sum(self._whole(part, anchors) for part, anchors in chosen), 1e-9)
        total = torch.zeros((), device=self.target.device)
        for part, anchors in chosen:
            with self._precision():
                logits, states = self.look(part, anchors)
                held = states.detach().requires_grad_(True)
            for depth, rows, goal, counts in self._depths(part, anchors, logits):
                with self._precision():  # each by itself: the logits of one depth are large enough
                    q = self.net.logits(held[:, :, self.net.first + depth].flatten(0, 1)[rows])
                    value = share * self.weight(depth) * (self.loss(goal, q) * counts).sum()
                value.backward()
                total += value.detach()
            if held.grad is not None:
                states.backward(held.grad)
        return total

    def look(self, part: SelfData, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """The target's logits along the text [B, L, V], and what comes out for each row of each block [B, A, b, d].

        No gradient reaches the target.
        """
        shape, dtype = self.net.shape, self.net.norm.weight.dtype
        embed = self.target.model.get_input_embeddings()
        with torch.no_grad():
            out = self.target.model(part.tokens, use_cache=False, output_hidden_states=True)
            features = torch.cat([out.hidden_states[layer] for layer in shape.layers], -1).to(dtype)
            x = embed(self.block_tokens(part, anchors).flatten(1)).to(dtype)
        batch, length = part.tokens.shape
        columns = torch.arange(length, device=x.device)[None].expand(batch, -1)
        keys, values = self.net.context(self.net.fuse(features), self.net.rotation(columns))
        sees = block_mask(anchors.places, shape.block, length, pending=True, runs_text=False)
        rotary = self.net.rotation(anchors.rows(shape.block).flatten(1))
        states = self.net(x, rotary, packed_attention(sees, keys.chunk(shape.deep, 1), values.chunk(shape.deep, 1)))
        return out.logits, states.unflatten(1, (-1, shape.block))

    def block_tokens(self, part: SelfData, anchors: Anchors) -> Tensor:
        """[B, A, b]: the pending token, then masks."""
        shape = self.net.shape
        tokens = torch.full((*anchors.places.shape, shape.block), shape.mask, device=part.tokens.device)
        tokens[..., 0] = part.tokens.gather(1, anchors.places)
        return tokens

    def _depths(
        self, part: SelfData, anchors: Anchors, logits: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:  # fmt: skip
        """Of each depth: it, which blocks say a token of an answer there, the target's logits for it over the draft
        vocabulary, and where its choice is among them."""
        wanted = anchors.answers(part, self.net.deepest + 1)
        places = anchors.rows(self.net.deepest)  # whose logits say the next token
        length = part.tokens.shape[1]
        base = torch.arange(len(places), device=places.device)[:, None] * length
        for depth in range(self.net.deepest):
            rows = wanted[..., depth + 1].flatten().nonzero()[:, 0]
            told = logits.flatten(0, 1)[(base + places[..., depth].clamp(max=length - 1)).flatten()[rows]]
            inside = torch.isin(told.argmax(-1), self.net.ids)
            yield depth, rows, told.index_select(-1, self.net.ids), inside

    def _whole(self, part: SelfData, anchors: Anchors) -> float:
        said = anchors.answers(part, self.net.deepest + 1)[..., 1:].sum((0, 1)).tolist()
        return sum(self.weight(depth) * count for depth, count in enumerate(said))

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Acceptance of the first draft token, greedy and drawn, and greedy at each depth of a chain."""
        deepest = self.net.deepest
        offered, taken, drawn, count = [0.0] * deepest, [0.0] * deepest, 0.0, 0.0
        for part in self._parts(data):
            anchors = choose_anchors(part, self.plan.anchors, self.plan.seed)
            with self._precision():
                logits, states = self.look(part, anchors)
                alive = anchors.real.flatten()  # the depths before were right
                for depth, rows, goal, _ in self._depths(part, anchors, logits):
                    q = self.net.logits(states[:, :, self.net.first + depth].flatten(0, 1)[rows]).float()
                    places = (anchors.places + depth).flatten()[rows].clamp(max=part.tokens.shape[1] - 1)
                    told = logits[rows // anchors.places.shape[1], places].float()
                    if depth == 0:
                        p = (goal.float() - told.logsumexp(-1, keepdim=True)).exp()
                        drawn, count = drawn + float(torch.minimum(p, q.softmax(-1)).sum()), count + len(rows)
                    hit = self.net.ids[q.argmax(-1)] == told.argmax(-1)
                    still = alive[rows]
                    offered[depth] += float(still.sum())
                    taken[depth] += float((still & hit).sum())
                    alive = torch.zeros_like(alive).index_copy(0, rows, still & hit)
        rates = tuple(round(t / max(o, 1.0), 4) for t, o in zip(taken, offered, strict=True))
        return Point(0, 0.0, rates[0], round(drawn / max(count, 1.0), 4), depths=rates)

    def _parts(self, data: SelfData) -> Iterator[SelfData]:
        return parts(data, self.target.device)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.target.device.type == "cuda" else nullcontext()


def packed_attention(sees: Tensor, keys: tuple[Tensor, ...] = (), values: tuple[Tensor, ...] = ()) -> Attend:
    """Attention of a packed pass with the mask `sees`; each layer's keys and values of the text go before its rows'."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if keys:
            k, v = torch.cat([keys[layer], k], 2), torch.cat([values[layer], v], 2)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=sees[:, None])

    return attention
