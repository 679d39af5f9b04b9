"""Training an FSPAD drafter: EAGLE-2's, with sampled features and a guess that is aligned in part only.

arXiv 2408.15562. With the adapter, the guess is held against the target's feature and the adapted guess against its
distribution: no gradient of the feature's loss reaches the adapter. With `align=channels` there is no adapter, and
only the first channels of the guess are held against the feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.networks.eagle3 import Eagle3Shape
from outrider.models.networks.fspad import FspadLayer, FspadShape
from outrider.models.trained import load_trained
from outrider.train.kinds.eagle2 import Eagle2Learner, Eagle2Plan, drafter_head, new_layer
from outrider.train.loop import fast, setting
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class FspadPlan(Eagle2Plan):
    lift: float = setting(2.0, "width of the space in which features are sampled, in hidden sizes", 0)
    align: str = setting("adapter", "adapter: the head reads an adapted guess; channels: a part of the guess is free")
    channels: float = setting(0.5, "align=channels: share of the guess that is held against the feature", 0)


def fspad_learner(target: LoadedModel, data: SelfData, plan: FspadPlan, begin: Path | None) -> FspadLearner:
    """Untrained, or going on from the finished drafter in `begin`."""
    if plan.align not in ("adapter", "channels"):
        raise InputError(f"setting align is {plan.align!r}; use adapter or channels")
    net = load_trained("fspad", begin, target).float() if begin else new_fspad(target, data, plan)
    return FspadLearner(target, drafter_head(net, target), plan, fast(LOSSES[plan.loss], target.device))


def new_fspad(target: LoadedModel, data: SelfData, plan: FspadPlan) -> FspadLayer:
    """Untrained: sampling and adapter add nothing yet, so that it begins as EAGLE-2 does."""

    def make(shape: Eagle3Shape, ids: Tensor, head: nn.Module) -> FspadLayer:
        lift, adapter = max(1, round(plan.lift * shape.hidden)), max(1, shape.hidden // 4)
        widened = FspadShape(**shape.as_dict(), lift=lift, adapter=adapter if plan.align == "adapter" else 0)
        return FspadLayer(widened, ids, head)

    net = new_layer(target, data, plan, make)
    nn.init.zeros_(net.sampling.lower.weight)
    if net.adapter is not None:
        nn.init.zeros_(net.adapter.up.weight)
    return net


@dataclass(slots=True)
class FspadLearner(Eagle2Learner):
    def feature_loss(self, after: Tensor, goal: Tensor) -> Tensor:
        if self.plan.align == "channels":
            kept = max(1, round(self.plan.channels * after.shape[-1]))
            after, goal = after[..., :kept], goal[..., :kept]
        return Eagle2Learner.feature_loss(self, after, goal)
