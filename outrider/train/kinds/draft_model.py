"""Draft models as a kind: some of the target's layers, or a small model from scratch (FastDraft, arXiv 2411.11055).

Both learn the target's distribution at every token of an answer, on text it wrote itself; `train run --from` adds a
stage on other text. Decoding stays lossless whatever comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import LAYERS, drafter_parameters, load_draft, new_draft, packed, read_drafter
from outrider.models.small import SmallShape, small_model, small_shape
from outrider.train.kinds.distill import DraftLearner, pick_layers
from outrider.train.loop import LOSS_HELP, LoopPlan, fast, setting
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelPlan(LoopPlan):
    loss: str = setting("mix", LOSS_HELP)
    layers: tuple[int, ...] = setting((), "the target's layers it begins as, such as 0,1,28,29; empty: five of them")
    hidden: int = setting(0, "width of a small model from scratch; 0: the target's layers instead", 0)
    depth: int = setting(2, "layers of the small model", 1)
    intermediate: int = setting(0, "width of its MLP; 0: in proportion", 0)


@dataclass(slots=True)
class DraftModelLearner(DraftLearner):
    small: SmallShape | None
    layers: tuple[int, ...]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.draft.named_parameters()) if self.small else drafter_parameters(self.draft)

    @property
    def shape(self) -> dict[str, Any]:
        return self.small.as_dict() if self.small else {}

    def stored(self) -> dict[str, Tensor]:
        return packed({name: weight.detach() for name, weight in self.weights.items()}, False)


def draft_model_learner(
    target: LoadedModel, data: SelfData, plan: DraftModelPlan, begin: Path | None
) -> DraftModelLearner:  # fmt: skip
    """Untrained, or going on from the finished draft in `begin`, whose sizes it keeps."""
    if plan.hidden and plan.layers:
        raise InputError("settings hidden and layers exclude each other: a small model has no layers of the target's")
    loss = fast(LOSSES[plan.loss], target.device)
    known = read_drafter(begin, target, LAYERS)[0] if begin is not None else None
    small, layers = None, plan.layers
    if known is not None:
        small, layers = SmallShape(**known.shape) if known.shape else None, known.layers
    elif plan.hidden:
        small = small_shape(target.model, plan.hidden, plan.depth, plan.intermediate)
    elif not layers:
        total = int(target.model.config.get_text_config().num_hidden_layers)
        layers = pick_layers(str(min(5, total)), total)
    learner = DraftModelLearner(
        target.model, small_model(target.model, small) if small else new_draft(target, layers), loss, small, layers
    )
    if begin is not None:
        finished = load_draft(begin, target)
        theirs = dict(finished.named_parameters()) if small else drafter_parameters(finished)
        for name, weight in learner.weights.items():
            weight.data.copy_(theirs[name])
    return learner
