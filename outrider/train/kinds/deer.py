"""Training a DEER drafter: some of the target's layers become a model that fills masks behind a text, in two stages.

arXiv 2512.15176. Stage 1 makes a continuer of it: behind an anchor each token of a block is hidden with a chance t
drawn for the block, the end is marked, and what is hidden is to be said, weighing 1 / t. Stage 2 (`--from` the drafter
of stage 1) makes it sharp behind the text: all tokens of a block of random length R are hidden, and place i weighs
alpha^(R - i), scaled to sum to one. The text itself is read causally, so that its cache is exact. Stage 1 says the
text's tokens, which hang on what is shown behind them; stage 2 the target's distributions, with less noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError, UnsupportedModel
from outrider.models import LoadedModel
from outrider.models.networks.block import DeerNet
from outrider.models.trained import load_trained, target_head
from outrider.models.truncate import layer_list
from outrider.train.block_learner import (
    BlockLearner,
    BlockPlan,
    Blocks,
    Depth,
    block_shape,
    packed_attention,
    with_final_norm,
)
from outrider.train.block_mask import Anchors, block_mask, noise_of
from outrider.train.kinds.distill import pick_layers
from outrider.train.kinds.eagle2 import drafter_head
from outrider.train.loop import fast, setting
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData

LEAST_NOISE = 1e-3  # chance of being hidden: a block of which nothing is hidden teaches nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeerPlan(BlockPlan):
    layers: str = setting("", "how many of the target's layers it begins as, or which: 0,1,28,29; empty: four, or all")
    block: int = setting(16, "tokens of a block", 1)
    stage: int = setting(1, "1: continue a text; 2, from a drafter of stage 1: be sharp right behind it", 1)
    alpha: float = setting(1.01, "stage 2: weight of a place against the next", 1)


def deer_learner(target: LoadedModel, data: SelfData, plan: DeerPlan, begin: Path | None) -> DeerLearner:
    """Copies of the target's layers, or going on from the finished drafter in `begin`."""
    if plan.stage not in (1, 2):
        raise InputError(f"setting stage is {plan.stage}; use 1 or 2")
    if plan.stage == 2 and begin is None:
        raise InputError("setting stage is 2, which goes on from a drafter of stage 1; name it with --from")
    net = load_trained("deer", begin, target).float() if begin else new_net(target, data, plan)
    return DeerLearner(target, drafter_head(net, target), plan, fast(LOSSES[plan.loss], target.device))


def new_net(target: LoadedModel, data: SelfData, plan: DeerPlan) -> DeerNet:
    path, total = layer_list(target.model)
    chosen = pick_layers(plan.layers or str(min(4, total)), total)
    shape, ids = block_shape(target, data, plan, (), len(chosen), plan.block + 1, 0)
    net = DeerNet(shape, ids, target_head(target, ids))
    for layer, number in zip(net.layers, chosen, strict=True):
        copy_layer(layer, target.model.get_submodule(f"{path}.{number}"))
    with_final_norm(net, target)
    return net.to(target.device)


def copy_layer(layer: nn.Module, theirs: nn.Module) -> None:
    """Changes a layer into one of the target's; a layer of another make is refused."""
    stored = {name: weight.detach().float() for name, weight in theirs.named_parameters()}
    wanted = dict(layer.named_parameters())
    if {n: w.shape for n, w in stored.items()} != {n: w.shape for n, w in wanted.items()}:
        raise UnsupportedModel(
            f"layers of {type(theirs).__name__} cannot become a block drafter: they have other weights than Llama's"
        )
    for name, weight in wanted.items():
        weight.data.copy_(stored[name])


@dataclass(slots=True)
class DeerLearner(BlockLearner):
    def blocks(self, part: SelfData, anchors: Anchors) -> Blocks:
        return self._refining(part, anchors) if self.plan.stage == 2 else self._continuing(part, anchors)

    def _continuing(self, part: SelfData, anchors: Anchors) -> Blocks:
        """Stage 1: what is hidden weighs 1 / t, all else nothing."""
        depth, shape, device = self.net.deepest, anchors.places.shape, part.tokens.device
        noise = noise_of(part, self.plan.seed + 1)
        t = 1 - torch.rand(shape, generator=noise).to(device) * (1 - LEAST_NOISE)
        hidden = torch.rand((*shape, depth), generator=noise).to(device) < t[..., None]
        tokens, answers = self.masked(part, anchors), anchors.answers(part, depth + 1)[..., 1:]
        places = anchors.rows(depth + 1)[..., 1:]
        inside = places < part.tokens.shape[1]
        said = part.tokens.gather(1, places.clamp(max=part.tokens.shape[1] - 1).flatten(1)).view(places.shape)
        shown = inside & ~hidden
        tokens[..., :depth] = torch.where(shown, said, tokens[..., :depth])
        return Blocks(tokens, None, (answers & hidden) / t[..., None], float(answers.sum()))

    def _refining(self, part: SelfData, anchors: Anchors) -> Blocks:
        """Stage 2: the first R places of each block, the end right behind them."""
        depth, shape, device = self.net.deepest, anchors.places.shape, part.tokens.device
        length = torch.randint(1, depth + 1, shape, generator=noise_of(part, self.plan.seed + 1)).to(device)[..., None]
        row = torch.arange(depth + 1, device=device)
        tokens = torch.where(row == length, self.net.shape.end, self.masked(part, anchors))
        weights = refinement_weights(length, depth, self.plan.alpha)
        weights = weights * anchors.answers(part, depth + 1)[..., 1:]
        return Blocks(tokens, row <= length, weights, float(anchors.real.sum()))

    def cost(self, depth: Depth, q: Tensor) -> Tensor:
        if self.plan.stage == 2:
            return BlockLearner.cost(self, depth, q)
        there = self.net.ids == depth.said[:, None]  # [n, vocabulary]
        return -(q.float().log_softmax(-1) * there).sum(-1)

    def look(self, part: SelfData, anchors: Anchors, tokens: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        net, block = self.net, self.net.shape.block
        batch, length = part.tokens.shape
        with torch.no_grad():
            logits = self.target.model(part.tokens, use_cache=False).logits
            rows = torch.cat([part.tokens, tokens.flatten(1)], 1)
            x = self.target.model.get_input_embeddings()(rows).to(net.norm.weight.dtype)
        columns = torch.arange(length, device=x.device)[None].expand(batch, -1)
        positions = torch.cat([columns, (anchors.rows(block) + 1).flatten(1)], 1)
        sees = block_mask(anchors.places, block, length, pending=False, runs_text=True, kept=kept)
        states = net(x, net.rotation(positions), packed_attention(sees))[:, length:]
        return logits, states.unflatten(1, (-1, block))


def refinement_weights(length: Tensor, depth: int, alpha: float) -> Tensor:
    """[..., depth] for lengths R [..., 1]: alpha^(R - i) for place i = 1..R, scaled to sum to one."""
    place = torch.arange(1, depth + 1, device=length.device)
    weights = alpha ** (length - place).clamp(min=0) * (place <= length)
    return weights / weights.sum(-1, keepdim=True)
