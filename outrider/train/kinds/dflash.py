"""Training a DFlash drafter: blocks of masks at many anchors of a text, filled at once, against what the target says.

arXiv 2602.06036: the target is frozen, places further ahead weigh exp(-(k - 1) / gamma). Goals are the target's
distributions along the text: averaged over the text they teach the same as its tokens would, with less noise; `--loss
ce` comes nearest to the paper's hard labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.networks.block import DFlashNet
from outrider.models.trained import load_trained, target_head
from outrider.train.block_learner import BlockLearner, BlockPlan, Blocks, block_shape, packed_attention, with_final_norm
from outrider.train.block_mask import Anchors, block_mask
from outrider.train.kinds.eagle2 import drafter_head
from outrider.train.kinds.eagle3 import default_layers, fuse_evenly, initialised
from outrider.train.loop import fast, setting
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashPlan(BlockPlan):
    layers: tuple[int, ...] = setting((), "target layers whose inputs are read, such as 2,15,27; empty: as eagle3")
    deep: int = setting(2, "layers of the drafter", 1)
    block: int = setting(8, "tokens of a block, the pending one among them", 2)
    intermediate: int = setting(0, "width of its MLPs; 0: the target's", 0)
    gamma: float = setting(4.0, "depths after which a place weighs a third", 1e-3)


def dflash_learner(target: LoadedModel, data: SelfData, plan: DFlashPlan, begin: Path | None) -> DFlashLearner:
    """Untrained, or going on from the finished drafter in `begin`."""
    net = load_trained("dflash", begin, target).float() if begin else new_net(target, data, plan)
    return DFlashLearner(target, drafter_head(net, target), plan, fast(LOSSES[plan.loss], target.device))


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


@dataclass(slots=True)
class DFlashLearner(BlockLearner):
    def weight(self, depth: int) -> float:
        """Of the token at this depth, the first being 0."""
        return math.exp(-depth / self.plan.gamma)

    def blocks(self, part: SelfData, anchors: Anchors) -> Blocks:
        """What drafting shows; nothing is lost beyond the text or on what is no answer."""
        each = torch.tensor([self.weight(depth) for depth in range(self.net.deepest)], device=self.target.device)
        weights = anchors.answers(part, self.net.deepest + 1)[..., 1:] * each
        return Blocks(self.masked(part, anchors), None, weights, float(weights.sum()))

    def look(self, part: SelfData, anchors: Anchors, tokens: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        net, shape, dtype = self.net, self.net.shape, self.net.norm.weight.dtype
        with torch.no_grad():
            out = self.target.model(part.tokens, use_cache=False, output_hidden_states=True)
            features = torch.cat([out.hidden_states[layer] for layer in shape.layers], -1).to(dtype)
            x = self.target.model.get_input_embeddings()(tokens.flatten(1)).to(dtype)
        batch, length = part.tokens.shape
        columns = torch.arange(length, device=x.device)[None].expand(batch, -1)
        keys, values = net.context(net.fuse(features), net.rotation(columns))
        sees = block_mask(anchors.places, shape.block, length, pending=True, runs_text=False, kept=kept)
        attention = packed_attention(sees, keys.chunk(shape.deep, 1), values.chunk(shape.deep, 1))
        states = net(x, net.rotation(anchors.rows(shape.block).flatten(1)), attention)
        return out.logits, states.unflatten(1, (-1, shape.block))
