"""Block drafters while they are trained: blocks at many anchors of a text, all in one pass, against what it says there.

Each block is as if it were alone (`block_mask`). A kind says what stands in the rows of its blocks, how much each place
counts, and what it costs; goals are the target's distributions along the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outrider.models import LoadedModel
from outrider.models.drafts import packed
from outrider.models.networks.block import Attend, BlockNet, BlockShape
from outrider.models.truncate import final_norm
from outrider.train.block_mask import Anchors, choose_anchors
from outrider.train.kinds.eagle2 import head_size
from outrider.train.kinds.eagle3 import VOCAB, draft_vocabulary, layer_shape
from outrider.train.loop import LOSS_HELP, LoopPlan, Point, parts, setting, split
from outrider.train.losses import Loss
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan(LoopPlan):
    """Settings of all kinds that fill blocks."""

    loss: str = setting("kl", LOSS_HELP)
    vocab: int = setting(0, f"tokens the drafter can say: those the target says most; 0: {VOCAB:,}", 0)
    anchors: int = setting(64, "blocks of a sequence in an update", 1)
    eight_bits: bool = setting(False, "store matrices as int8")


class Blocks(NamedTuple):
    """What stands in the blocks of some texts, and what is asked of them."""

    tokens: Tensor  # [B, A, rows]
    kept: Tensor | None  # [B, A, rows]: rows that are there at all; None: every row
    weights: Tensor  # [B, A, depths]: how much each place counts
    whole: float  # what these weights are a share of


class Depth(NamedTuple):
    """One depth of the blocks of some texts."""

    number: int
    rows: Tensor  # [n] numbers of the blocks that say a token of an answer there
    told: Tensor  # [n, V] the target's logits for it
    said: Tensor  # [n] what the text says


@dataclass(slots=True)
class BlockLearner:
    target: LoadedModel
    net: Any  # a BlockNet
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

    def blocks(self, part: SelfData, anchors: Anchors) -> Blocks:
        """What training shows and asks."""
        raise NotImplementedError

    def look(self, part: SelfData, anchors: Anchors, tokens: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The target's logits along the text [B, L, V], and what comes out for each row of each block [B, A, rows, d].

        No gradient reaches the target.
        """
        raise NotImplementedError

    def cost(self, depth: Depth, q: Tensor) -> Tensor:
        """[n], of the drafter's logits over its vocabulary; nothing where the target's choice is not among them."""
        return self.loss(depth.told.index_select(-1, self.net.ids), q) * torch.isin(
            depth.told.argmax(-1), self.net.ids
        )  # fmt: skip

    def masked(self, part: SelfData, anchors: Anchors) -> Tensor:
        """[B, A, rows]: the blocks of drafting, every token to be found."""
        shape = self.net.shape
        rows = torch.from_numpy(self.net.block(0)).to(part.tokens.device)
        tokens = rows.expand(*anchors.places.shape, shape.block).clone()
        if self.net.first:
            tokens[..., 0] = part.tokens.gather(1, anchors.places)
        return tokens

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss a place of full weight, still on the device."""
        given = []
        for part in parts(batch, self.target.device):
            anchors = choose_anchors(part, self.plan.anchors, self.plan.seed)
            given.append((part, anchors, self.blocks(part, anchors)))
        share = 1.0 / max(sum(blocks.whole for _, _, blocks in given), 1e-9)
        total = torch.zeros((), device=self.target.device)
        for part, anchors, blocks in given:
            with self._precision():
                logits, states = self.look(part, anchors, blocks.tokens, blocks.kept)
                held = states.detach().requires_grad_(True)
            for depth in self._depths(part, anchors, logits):
                weights = blocks.weights[..., depth.number].flatten()[depth.rows]
                with self._precision():  # each by itself: the logits of one depth are large enough
                    q = self.net.logits(held[:, :, self.net.first + depth.number].flatten(0, 1)[depth.rows])
                    value = share * (weights * self.cost(depth, q)).sum()
                value.backward()
                total += value.detach()
            if held.grad is not None:
                states.backward(held.grad)
        return total

    def _depths(self, part: SelfData, anchors: Anchors, logits: Tensor) -> Iterator[Depth]:
        wanted, length = anchors.answers(part, self.net.deepest + 1), part.tokens.shape[1]
        places = anchors.rows(self.net.deepest + 1).clamp(max=length - 1)
        places = (places + torch.arange(len(places), device=places.device)[:, None, None] * length).flatten(0, 1)
        for number in range(self.net.deepest):
            rows = wanted[..., number + 1].flatten().nonzero()[:, 0]  # only what counts is taken to the vocabulary
            told = logits.flatten(0, 1)[places[rows, number]]
            yield Depth(number, rows, told, part.tokens.flatten()[places[rows, number + 1]])

    @torch.no_grad()
    def measure(self, data: SelfData) -> Point:
        """Acceptance of the first draft token, greedy and drawn, and greedy at each depth of a chain."""
        deepest = self.net.deepest
        offered, taken, drawn, count = [0.0] * deepest, [0.0] * deepest, 0.0, 0.0
        for part in parts(data, self.target.device):
            anchors = choose_anchors(part, self.plan.anchors, self.plan.seed)
            with self._precision():
                logits, states = self.look(part, anchors, self.masked(part, anchors), None)
                alive = anchors.real.flatten()  # the depths before were right
                for number, rows, told, _ in self._depths(part, anchors, logits):
                    q = self.net.logits(states[:, :, self.net.first + number].flatten(0, 1)[rows]).float()
                    if number == 0:
                        p = told.float().softmax(-1).index_select(-1, self.net.ids)
                        drawn, count = drawn + float(torch.minimum(p, q.softmax(-1)).sum()), count + len(rows)
                    hit = self.net.ids[q.argmax(-1)] == told.argmax(-1)
                    still = alive[rows]
                    offered[number] += float(still.sum())
                    taken[number] += float((still & hit).sum())
                    alive = torch.zeros_like(alive).index_copy(0, rows, still & hit)
        rates = tuple(round(t / max(o, 1.0), 4) for t, o in zip(taken, offered, strict=True))
        return Point(0, 0.0, rates[0], round(drawn / max(count, 1.0), 4), depths=rates)

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


def block_shape(
    target: LoadedModel, data: SelfData, plan: BlockPlan, layers: tuple[int, ...], deep: int, block: int,
    intermediate: int,
) -> tuple[BlockShape, Tensor]:  # fmt: skip
    """Layers of the target's own sizes, and the tokens that can be said."""
    every, training = head_size(target), split(data, plan.held_out)[1]
    ids = draft_vocabulary(training, plan.vocab or VOCAB, every, target.eos_ids)
    like = layer_shape(target, layers, len(ids), intermediate)
    mask, end = unsaid(training, every)
    return BlockShape(
        like.hidden, like.heads, like.kv_heads, like.head_dim, like.intermediate, layers, deep, block, mask, len(ids),
        like.theta, float(getattr(target.model.config.get_text_config(), "rms_norm_eps", None) or 1e-5), end=end,
    ), ids  # fmt: skip


def unsaid(data: SelfData, total: int) -> tuple[int, int]:
    """The last two of the tokens said least: their embeddings can stand for one to be found and for a block's end."""
    counts = torch.bincount(data.tokens.flatten().long(), minlength=total)
    last, before = torch.sort(counts.flip(0), stable=True).indices[:2].tolist()
    return total - 1 - last, total - 1 - before


def with_final_norm(net: BlockNet, target: LoadedModel) -> None:
    """Changes the last norm into the target's, which its head expects."""
    weight = getattr(final_norm(target.model), "weight", None)
    if weight is not None and weight.shape == net.norm.weight.shape:
        net.norm.weight.data.copy_(weight.detach().float())
