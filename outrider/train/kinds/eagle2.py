"""Training an EAGLE-2 drafter: guess the target's next top feature, and what the target's head reads from it.

arXiv 2401.15077: L = SmoothL1(guess, feature) + 0.1 D(p, q), with noise on the features that are shown, so that guesses
of the same size do not mislead when drafting. One step by default, on true features. More steps and `topk` are HASS
(arXiv 2408.15766): later steps read the layer's own guesses, through the masks of `unrolled`, with no gradient between
steps, and the tokens that the target likes best are recalled harder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from outrider.models import LoadedModel
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Shape
from outrider.models.networks.shared_head import SharedHead
from outrider.models.trained import load_trained, target_head
from outrider.train.kinds.eagle3 import TOPK_HELP, Eagle3Learner, draft_vocabulary, initialised, layer_shape
from outrider.train.loop import LOSS_HELP, LoopPlan, fast, setting, split
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData

Net = TypeVar("Net", bound=Eagle2Layer)
Owner = TypeVar("Owner", bound=SharedHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle2Plan(LoopPlan):
    loss: str = setting("kl", LOSS_HELP)
    vocab: int = setting(0, "tokens the drafter can say: those the target says most; 0: all", 0)
    intermediate: int = setting(0, "width of its MLP; 0: the target's", 0)
    unroll: int = setting(1, "steps, all but the first on its own guesses (HASS: 3)", 1)
    decay: float = setting(1.0, "weight of each step against the one before", 0)
    feature_weight: float = setting(1.0, "weight of the distance from the target's feature", 0)
    token_weight: float = setting(0.1, "weight of the loss between the distributions", 0)
    topk_weight: float = setting(0.0, TOPK_HELP, 0)
    topk: int = setting(10, "how many those are", 1)
    noise: float = setting(0.1, "largest noise on a value of the features shown", 0)
    eight_bits: bool = setting(False, "store matrices as int8")


def eagle2_learner(target: LoadedModel, data: SelfData, plan: Eagle2Plan, begin: Path | None) -> Eagle2Learner:
    """Untrained, or going on from the finished drafter in `begin`."""
    net = load_trained("eagle2", begin, target).float() if begin else new_layer(target, data, plan, Eagle2Layer)
    return Eagle2Learner(target, drafter_head(net, target), plan, fast(LOSSES[plan.loss], target.device))


def new_layer(
    target: LoadedModel, data: SelfData, plan: Eagle2Plan, make: Callable[[Eagle3Shape, Tensor, nn.Module], Net]
) -> Net:
    """Untrained: it begins with the guess that the feature stays as it is."""
    total, every = int(target.model.config.get_text_config().num_hidden_layers), head_size(target)
    ids = draft_vocabulary(split(data, plan.held_out)[1], plan.vocab or every, every, target.eos_ids)
    shape = layer_shape(target, (total,), len(ids), plan.intermediate)  # the last: what the target's head reads
    net = initialised(make(shape, ids, target_head(target, ids)), plan.seed)
    net.fc.weight.data[:, shape.hidden :].add_(torch.eye(shape.hidden))
    return net.to(target.device)


def head_size(target: LoadedModel) -> int:
    return len(target.model.get_output_embeddings().weight)


def drafter_head(net: Owner, target: LoadedModel) -> Owner:
    """With the target's head frozen, in a precision that trains: on a CPU nothing casts it in passing."""
    dtype = torch.float32 if target.device.type == "cpu" else target.model.dtype
    net.shared = (target_head(target, net.ids, dtype),)
    return net


@dataclass(slots=True)
class Eagle2Learner(Eagle3Learner):
    detached = True

    @property
    def depths(self) -> int:
        return max(self.plan.unroll, 3)

    def seen(self, state: Tensor, part: SelfData) -> Tensor:
        """With noise that is a function of the text, so that a resumed run sees the same."""
        if not self.plan.noise:
            return state
        random = torch.Generator(state.device).manual_seed(self.plan.seed + int(part.tokens.sum()))
        return state + self.plan.noise * (2 * torch.rand(state.shape, generator=random, device=state.device) - 1)

    def cost(self, p: Tensor, inside: Tensor, after: Tensor, goal: Tensor) -> Tensor:
        features = self.plan.feature_weight * self.feature_loss(after, goal)
        return features + self.distribution_cost(p, self.net.logits(after), self.plan.token_weight) * inside

    def feature_loss(self, after: Tensor, goal: Tensor) -> Tensor:
        """[rows], the mean over the values of a feature."""
        return smooth_l1_loss(after.float(), goal.float(), reduction="none").mean(-1)
