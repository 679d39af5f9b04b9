"""A draft model from the target itself: a few of its layers, aligned with it on text it wrote.

Papers: DistillSpec (arXiv 2310.08461), direct alignment (arXiv 2403.00858), FastDraft (arXiv 2411.11055). Trains on
soft targets at every token of an answer; embeddings and head stay the target's. Decoding stays lossless whatever comes
out. One device. A run that was killed goes on from its last checkpoint with the same steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import InputError, UnknownName
from outrider.models import LoadedModel
from outrider.models.drafts import CARD, DraftCard, new_draft, own_parameters, save_draft
from outrider.train.losses import LOSSES, Loss, acceptance
from outrider.train.selfdata import ANSWER, SelfData

CHECKPOINT, CURVE = "checkpoint.safetensors", "curve.json"
MOMENTS = ("exp_avg", "exp_avg_sq")  # the names AdamW gives its state


@dataclass(frozen=True, slots=True)
class DistillPlan:
    layers: tuple[int, ...]
    steps: int = 2000
    batch: int = 32  # sequences a step
    lr: float = 1e-3
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.01
    loss: str = "mix"
    held_out: int = 32  # sequences that only measure
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One entry of the training curve; acceptance of a single draft token on held-out answers."""

    step: int
    loss: float
    greedy: float
    sampled: float
    seconds: float


Progress = Callable[[int, int, Point], None]  # step, of, the latest point


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
    target: LoadedModel,
    data: SelfData,
    plan: DistillPlan,
    folder: Path,
    *,
    on_progress: Progress = lambda step, of, point: None,
    save_every: float = 120.0,  # seconds
    measure_every: int = 100,  # steps
    recipe: dict[str, Any] | None = None,  # said in the card besides the plan
    licence: str = "",
) -> tuple[PreTrainedModel, list[Point]]:
    """Train, resuming what `folder` holds, and leave the finished draft there with its curve."""
    if plan.loss not in LOSSES:
        raise UnknownName(f"unknown loss {plan.loss!r}; known losses: {', '.join(LOSSES)}")
    if len(data.tokens) <= plan.held_out:
        raise InputError(f"{len(data.tokens)} sequences are too few: {plan.held_out} are held out; write more tokens")
    if (folder / CARD).exists():
        raise InputError(f"{folder} already holds a finished draft; choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    draft = new_draft(target, plan.layers)
    weights = own_parameters(draft)
    for weight in weights.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights.values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay)
    identity = json.dumps({"target": target.fingerprint, **asdict(plan)})
    done, curve = _resume(folder / CHECKPOINT, identity, weights, optimizer)
    held_out, training = _split(data, plan.held_out)
    before = curve[-1].seconds if curve else 0.0
    began = saved = time.monotonic()
    if not curve:
        curve.append(Point(0, math.nan, *measure(target.model, draft, held_out), 0.0))
    loss, running = _fast(LOSSES[plan.loss], target.device), list[Tensor]()
    for step in range(done, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * schedule(step, plan)
        running.append(_step(target.model, draft, _batch(training, plan, step), loss, optimizer))
        on_progress(step + 1, plan.steps, curve[-1])
        if (step + 1) % measure_every == 0 or step + 1 == plan.steps:
            mean, running = float(torch.stack(running).mean()), []
            seconds = before + time.monotonic() - began
            curve.append(Point(step + 1, mean, *measure(target.model, draft, held_out), round(seconds, 1)))
            if time.monotonic() - saved >= save_every and step + 1 < plan.steps:
                _save(folder / CHECKPOINT, identity, step + 1, curve, weights, optimizer)
                saved = time.monotonic()
    last = curve[-1]
    card = DraftCard(
        target.name, target.fingerprint, plan.layers, {**asdict(plan), **(recipe or {})},
        {"held-out": {"greedy": last.greedy, "sampled": last.sampled}}, licence,
    )  # fmt: skip
    for weight in weights.values():
        weight.requires_grad_(False)
    save_draft(folder, draft, card)
    (folder / CURVE).write_text(json.dumps([asdict(point) for point in curve], indent=1).replace("NaN", "null") + "\n")
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return draft, curve


def schedule(step: int, plan: DistillPlan) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warm = max(1, round(plan.warmup * plan.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, plan.steps - warm)))


def _split(data: SelfData, held_out: int) -> tuple[SelfData, SelfData]:
    return (
        SelfData(data.tokens[:held_out], data.roles[:held_out]),
        SelfData(data.tokens[held_out:], data.roles[held_out:]),
    )


def _batch(data: SelfData, plan: DistillPlan, step: int) -> SelfData:
    """A function of the step alone, so that a resumed run sees the same batches: every sequence once an epoch."""
    count = len(data.tokens)
    wanted = range(step * plan.batch, (step + 1) * plan.batch)
    orders = {e: _order(count, plan.seed, e) for e in {i // count for i in wanted}}
    rows = torch.tensor([int(orders[i // count][i % count]) for i in wanted])
    return SelfData(data.tokens[rows], data.roles[rows])


def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def _step(
    target: PreTrainedModel, draft: PreTrainedModel, batch: SelfData, loss: Loss, optimizer: torch.optim.Optimizer
) -> Tensor:
    """One update from the whole batch, a few sequences at a time; its loss an answer token, still on the device."""
    answers = max(1, batch.answer_tokens)
    total = torch.zeros((), device=target.device)
    optimizer.zero_grad(set_to_none=True)
    for part in _parts(batch, target.device):
        p, q, wanted = _rows(target, draft, part)
        # Masked, not picked out: the gradient of picking rows out of so large a tensor costs more than it saves.
        value = (loss(p, q) * wanted).sum() / answers
        value.backward()
        total += value.detach()
    nn.utils.clip_grad_norm_([w for group in optimizer.param_groups for w in group["params"]], 1.0)
    optimizer.step()
    return total


def _parts(data: SelfData, device: torch.device) -> Iterator[SelfData]:
    """On the device, and so few that both models' logits fit in its memory with room to spare."""
    rows = 16 if device.type == "cuda" else 4
    for tokens, roles in zip(data.tokens.split(rows), data.roles.split(rows), strict=True):
        yield SelfData(tokens.to(device).long(), roles.to(device))


def _rows(target: PreTrainedModel, draft: PreTrainedModel, part: SelfData) -> tuple[Tensor, Tensor, Tensor]:
    """Both models' logits after every token, [tokens, vocabulary], and which of the rows predict an answer's token."""
    with torch.autocast("cuda", torch.bfloat16) if part.tokens.is_cuda else nullcontext():
        with torch.no_grad():
            p = target(part.tokens, use_cache=False).logits
        q = draft(part.tokens, use_cache=False).logits
    wanted = nn.functional.pad(part.roles[:, 1:] == ANSWER, (0, 1))
    return p.flatten(0, 1), q.flatten(0, 1), wanted.flatten()


def _fast(loss: Loss, device: torch.device) -> Loss:
    """Fused on a GPU, where the passes over a large vocabulary would otherwise be half of a step's time."""
    return torch.compile(loss) if device.type == "cuda" else loss


@torch.no_grad()
def measure(target: PreTrainedModel, draft: PreTrainedModel, data: SelfData) -> tuple[float, float]:
    """Mean acceptance of one draft token over the answers: (greedy, drawn at temperature 1)."""
    greedy, drawn = 0.0, 0.0
    for part in _parts(data, target.device):
        p, q, wanted = _rows(target, draft, part)
        same, likely = acceptance(p, q)
        greedy, drawn = greedy + float((same * wanted).sum()), drawn + float((likely * wanted).sum())
    answers = max(1, data.answer_tokens)
    return greedy / answers, drawn / answers


def _save(
    path: Path, identity: str, step: int, curve: list[Point], weights: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:  # fmt: skip
    tensors = {f"weight.{name}": weight.detach() for name, weight in weights.items()}
    for name, weight in weights.items():
        tensors |= {f"{moment}.{name}": optimizer.state[weight][moment] for moment in MOMENTS}
    points = json.dumps([asdict(point) for point in curve])
    save_file(tensors, f"{path}.partial", {"plan": identity, "step": str(step), "curve": points})
    os.replace(f"{path}.partial", path)


def _resume(
    path: Path, identity: str, weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, list[Point]]:
    """Puts a checkpoint's tensors in place; how many steps are done, and the curve so far."""
    if not path.exists():
        return 0, []
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it to begin again") from error
    if about.get("plan") != identity:
        raise InputError(f"{path} belongs to another target or plan; choose another folder or remove it")
    step = int(about["step"])
    for name, weight in weights.items():
        weight.data.copy_(tensors[f"weight.{name}"])
        moments = {moment: tensors[f"{moment}.{name}"].to(weight.device) for moment in MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(float(step)), **moments}
    return step, [Point(**point) for point in json.loads(about["curve"])]
