"""Training Kangaroo's adapter: the target's distribution at every token of an answer is the goal; all else is frozen.

arXiv 2404.18911. The shortened model runs over the text as it does when it drafts, so there is nothing to unroll: its
cache holds what the target's first layers say of the text, never its own guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import packed, read_card, read_drafter, unpacked
from outrider.models.networks.kangaroo import Weights, kangaroo_model
from outrider.models.trained import KANGAROO
from outrider.models.truncate import layer_list
from outrider.train.kinds.distill import DraftLearner
from outrider.train.loop import LOSS_HELP, LoopPlan, fast, setting
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooPlan(LoopPlan):
    loss: str = setting("kl", LOSS_HELP)
    layer: int = setting(0, "how many of the target's first layers it stands behind; 0: one in fourteen", 0)


@dataclass(slots=True)
class KangarooLearner(DraftLearner):
    layer: int
    adapter: Weights

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return {name: owner._parameters[key] for name, (owner, key) in self.adapter.items()}

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def shape(self) -> dict[str, Any]:
        return {"layer": self.layer}

    def stored(self) -> dict[str, Tensor]:
        return packed({name: weight.detach() for name, weight in self.weights.items()}, False)


def kangaroo_learner(target: LoadedModel, data: SelfData, plan: KangarooPlan, begin: Path | None) -> KangarooLearner:
    """Untrained, beginning as the target's next layer does; or going on from the finished drafter in `begin`."""
    layer = plan.layer or max(1, round(layer_list(target.model)[1] / 14))
    if begin is not None:
        known = int(read_card(begin).shape.get("layer", 0))
        if plan.layer and plan.layer != known:
            raise InputError(f"{begin}: its exit layer is {known}, not {plan.layer}; leave the setting out")
        layer = known
    draft, adapter = kangaroo_model(target.model, layer)
    if begin is not None:
        for name, weight in unpacked(read_drafter(begin, target, KANGAROO)[1]).items():
            owner, key = adapter[name]
            owner._parameters[key].data.copy_(weight)
    return KangarooLearner(target.model, draft, fast(LOSSES[plan.loss], target.device), layer, adapter)
