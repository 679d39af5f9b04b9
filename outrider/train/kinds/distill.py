"""A draft model from the target itself: a few of its layers, aligned with it on text it wrote.

Papers: DistillSpec (arXiv 2310.08461), direct alignment (arXiv 2403.00858), FastDraft (arXiv 2411.11055). Trains on
soft targets at every token of an answer; embeddings and head stay the target's. Decoding stays lossless whatever comes
out. A run that was killed goes on from its last checkpoint with the same steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import DraftCard, drafter_parameters, new_draft, save_draft
from outrider.train.crew import crew
from outrider.train.loop import LoopPlan, Point, Progress, fast, finish, parts, prepare, setting, train
from outrider.train.losses import LOSSES, Loss, acceptance
from outrider.train.text.dialogue import ANSWER
from outrider.train.text.selfdata import SelfData


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillPlan(LoopPlan):
    batch: int = setting(32, "sequences an update", 1)
    layers: tuple[int, ...]


@dataclass(slots=True)
class DraftLearner:
    """Chosen layers, to be aligned with the whole."""

    target: PreTrainedModel
    draft: PreTrainedModel
    loss: Loss

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return drafter_parameters(self.draft)

    def backward(self, batch: SelfData) -> Tensor:
        """From the whole batch, a few sequences at a time; its loss an answer token, still on the device."""
        answers = max(1, batch.answer_tokens)
        total = torch.zeros((), device=self.target.device)
        for part in parts(batch, self.target.device):
            p, q, wanted = rows(self.target, self.draft, part)
            # Masked, not picked out: the gradient of picking rows out of so large a tensor costs more than it saves.
            value = (self.loss(p, q) * wanted).sum() / answers
            value.backward()
            total += value.detach()
        return total

    def measure(self, data: SelfData) -> Point:
        return Point(0, 0.0, *measure(self.target, self.draft, data))


def pick_layers(wanted: str, total: int) -> tuple[int, ...]:
    """`5`: so many, half from each end, which aligned fastest of the choices tried; `0,7,29`: exactly these."""
    try:
        numbers = tuple(int(part) for part in wanted.split(","))
    except ValueError:
        raise InputError(f"layers {wanted!r}: write a count such as 5, or numbers such as 0,1,2,28,29") from None
    if "," not in wanted:
        count, numbers = numbers[0], (*range((numbers[0] + 1) // 2), *range(total - numbers[0] // 2, total))
        if not 1 <= count <= total:
            raise InputError(f"layers is {count}; the target has {total}")
    if not all(0 <= number < total for number in numbers):
        raise InputError(f"layers {wanted}: the target's are 0..{total - 1}")
    return numbers


def distill(
    target: LoadedModel, data: SelfData, plan: DistillPlan, folder: Path, *,
    on_progress: Progress = lambda step, of, point: None,
    save_every: float = 120.0,  # seconds
    measure_every: int = 100,  # steps
    recipe: dict[str, Any] | None = None,  # said in the card besides the plan
    licence: str = "",
) -> tuple[PreTrainedModel, list[Point]]:  # fmt: skip
    """Train, resuming what `folder` holds, and leave the finished draft there with its curve."""
    prepare(plan, data, folder)
    together = crew()
    draft = new_draft(target, plan.layers)
    learner = DraftLearner(target.model, draft, fast(LOSSES[plan.loss], target.device))
    curve = train(
        learner, data, plan, folder, {"kind": "draft-model", "target": target.fingerprint},
        on_progress=on_progress, save_every=save_every, measure_every=measure_every, together=together,
    )  # fmt: skip
    last = curve[-1]
    card = DraftCard(
        target.name, target.fingerprint, plan.layers, {**asdict(plan), **(recipe or {})},
        {"held-out": {"greedy": last.greedy, "sampled": last.sampled}}, licence,
    )  # fmt: skip
    if together.first:
        save_draft(folder, draft, card)
        finish(folder, curve)
    together.wait()
    return draft, curve


def rows(target: PreTrainedModel, draft: PreTrainedModel, part: SelfData) -> tuple[Tensor, Tensor, Tensor]:
    """Both models' logits after every token, [tokens, vocabulary], and which of the rows predict an answer's token."""
    with torch.autocast("cuda", torch.bfloat16) if part.tokens.is_cuda else nullcontext():
        with torch.no_grad():
            p = target(part.tokens, use_cache=False).logits
        q = draft(part.tokens, use_cache=False).logits
    wanted = nn.functional.pad(part.roles[:, 1:] == ANSWER, (0, 1))
    return p.flatten(0, 1), q.flatten(0, 1), wanted.flatten()


@torch.no_grad()
def measure(target: PreTrainedModel, draft: PreTrainedModel, data: SelfData) -> tuple[float, float]:
    """Mean acceptance of one draft token over the answers: (greedy, drawn at temperature 1)."""
    greedy, drawn, predicted = 0.0, 0.0, 0  # nobody predicts an answer's token that a sequence begins with
    for part in parts(data, target.device):
        p, q, wanted = rows(target, draft, part)
        same, likely = acceptance(p, q)
        greedy, drawn = greedy + float((same * wanted).sum()), drawn + float((likely * wanted).sum())
        predicted += int(wanted.sum())
    return greedy / max(1, predicted), drawn / max(1, predicted)
