"""The loop that all kinds of drafters are trained in: schedule, batches, checkpoints and the curve.

Batches are a function of the step alone, so a run that was killed goes on from its last checkpoint with the same steps.
One device, or one for each process of a crew; the kind says what an update and a measurement are.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.core.errors import InputError, UnknownName, did_you_mean
from outrider.models.drafts import CARD
from outrider.train.crew import Crew, crew
from outrider.train.losses import LOSSES, Loss
from outrider.train.text.selfdata import SelfData, differences, digest

CHECKPOINT, CURVE, PICTURE = "checkpoint.safetensors", "curve.json", "curve.svg"
LOSS_HELP = f"what is lowered: {', '.join(LOSSES)}"
MOMENTS = ("exp_avg", "exp_avg_sq")  # the names AdamW gives its state


def setting(default: Any, help: str, least: float | None = None) -> Any:
    """A field of a plan, with what users are told of it and the least value that makes sense."""
    return field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """Settings that all kinds have."""

    steps: int = setting(3000, "updates of the drafter", 0)
    batch: int = setting(16, "sequences an update", 1)
    lr: float = setting(1e-3, "highest learning rate", 1e-9)
    warmup: float = setting(0.05, "share of the steps in which the rate rises", 0)
    weight_decay: float = setting(0.01, "of AdamW", 0)
    loss: str = setting("mix", LOSS_HELP)
    held_out: int = setting(32, "sequences that only measure", 1)
    seed: int = setting(0, "of the weights and of the batches")


@dataclass(frozen=True, slots=True)
class Point:
    """One entry of the training curve, over held-out answers."""

    step: int
    loss: float
    greedy: float  # acceptance of a single draft token
    sampled: float
    seconds: float = 0.0
    depths: tuple[float, ...] = ()  # greedy acceptance at each depth, for kinds that train several


Progress = Callable[[int, int, Point], None]  # step, of, the latest point


class Learner(Protocol):
    """One kind of drafter while it is trained."""

    @property
    def weights(self) -> dict[str, nn.Parameter]: ...
    def backward(self, batch: SelfData) -> Tensor: ...  # adds to the gradients; the loss of an answer token
    def measure(self, data: SelfData) -> Point: ...  # its step, loss and seconds are the loop's


class Trainee(Learner, Protocol):
    """A learner that ends as a drafter on disk."""

    @property
    def layers(self) -> tuple[int, ...]: ...  # of the target: those it began as, or those whose features it reads
    @property
    def shape(self) -> dict[str, Any]: ...  # sizes of its network
    def stored(self) -> dict[str, Tensor]: ...  # what a file keeps


def train(
    learner: Learner, data: SelfData, plan: LoopPlan, folder: Path, about: dict[str, Any], *,
    on_progress: Progress = lambda step, of, point: None,
    save_every: float = 120.0,  # seconds
    measure_every: int = 100,  # steps
    together: Crew | None = None,
) -> list[Point]:  # fmt: skip
    """Update the learner's weights, going on from the checkpoint in `folder`; `about` tells runs apart."""
    weights, together = learner.weights, together or crew()
    for weight in weights.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        weights.values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay,
        fused=next(iter(weights.values())).is_cuda,
    )  # fmt: skip
    identity = json.dumps({**about, **asdict(plan), "data": digest(data)})
    done, curve = _resume(folder / CHECKPOINT, identity, weights, optimizer)
    together.align(weights.values())
    held_out, training = split(data, plan.held_out)
    before = curve[-1].seconds if curve else 0.0
    began = saved = time.monotonic()
    running = list[Tensor]()

    def note(step: int, loss: float) -> None:
        seen = asdict(learner.measure(held_out))
        curve.append(
            Point(**seen | {"step": step, "loss": loss, "seconds": round(before + time.monotonic() - began, 1)})
        )

    if not curve:
        note(0, math.nan)
    for step in range(done, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * schedule(step, plan)
        optimizer.zero_grad(set_to_none=True)
        batch = batch_of(training, plan, step)
        share = together.share(batch)
        loss = learner.backward(share)
        running.append(together.join(weights.values(), loss, share.answer_tokens / max(1, batch.answer_tokens)))
        nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        on_progress(step + 1, plan.steps, curve[-1])
        if (step + 1) % measure_every == 0 or step + 1 == plan.steps:
            note(step + 1, float(torch.stack(running).mean()))
            running = []
            if together.first and time.monotonic() - saved >= save_every and step + 1 < plan.steps:
                _save(folder / CHECKPOINT, identity, step + 1, curve, weights, optimizer)
                saved = time.monotonic()
    for weight in weights.values():
        weight.requires_grad_(False)
    return curve


def check_plan(plan: LoopPlan) -> None:
    if plan.loss not in LOSSES:
        hint = did_you_mean(plan.loss, LOSSES)
        raise UnknownName(f"unknown loss {plan.loss!r}; {hint}known losses: {', '.join(LOSSES)}")
    for setting_ in fields(plan):
        value, least = getattr(plan, setting_.name), setting_.metadata.get("least")
        if least is not None and not (value >= least and math.isfinite(value)):
            raise InputError(f"setting {setting_.name} is {value}; use {least:g} or more")


def prepare(plan: LoopPlan, data: SelfData, folder: Path) -> None:
    """Refuse what cannot work before the work; make the folder."""
    check_plan(plan)
    if len(data.tokens) <= plan.held_out:
        raise InputError(f"{len(data.tokens)} sequences are too few: {plan.held_out} are held out; write more tokens")
    if (folder / CARD).exists():
        raise InputError(f"{folder} already holds a finished draft; choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)


def finish(folder: Path, curve: list[Point]) -> None:
    """Changes the folder: the curve as numbers and, where matplotlib is there, as a picture; no checkpoint any more."""
    from outrider.train.picture import draw_curve

    (folder / CURVE).write_text(json.dumps([asdict(point) for point in curve], indent=1).replace("NaN", "null") + "\n")
    draw_curve(curve, folder / PICTURE)
    (folder / CHECKPOINT).unlink(missing_ok=True)


def schedule(step: int, plan: LoopPlan) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warm = max(1, round(plan.warmup * plan.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, plan.steps - warm)))


def split(data: SelfData, held_out: int) -> tuple[SelfData, SelfData]:
    """Sequences that only measure, spread over all the data, and the others."""
    rows = torch.zeros(len(data.tokens), dtype=torch.bool)
    rows[torch.linspace(0, len(rows) - 1, held_out).long()] = True
    return SelfData(data.tokens[rows], data.roles[rows]), SelfData(data.tokens[~rows], data.roles[~rows])


def batch_of(data: SelfData, plan: LoopPlan, step: int) -> SelfData:
    """A function of the step alone, so that a resumed run sees the same batches: every sequence once an epoch."""
    count = len(data.tokens)
    wanted = range(step * plan.batch, (step + 1) * plan.batch)
    orders = {e: _order(count, plan.seed, e) for e in {i // count for i in wanted}}
    rows = torch.tensor([int(orders[i // count][i % count]) for i in wanted])
    return SelfData(data.tokens[rows], data.roles[rows])


def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def parts(data: SelfData, device: torch.device) -> Iterator[SelfData]:
    """On the device, and so few that both models' logits fit in its memory with room to spare."""
    rows = 16 if device.type == "cuda" else 4
    for tokens, roles in zip(data.tokens.split(rows), data.roles.split(rows), strict=True):
        yield SelfData(tokens.to(device).long(), roles.to(device))


def fast(loss: Loss, device: torch.device) -> Loss:
    """Fused on a GPU, where the passes over a large vocabulary would otherwise be half of a step's time."""
    return torch.compile(loss) if device.type == "cuda" else loss


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
        told = differences(json.loads(about.get("plan", "{}")), json.loads(identity))
        raise InputError(f"{path} is of a run with {told}; ask for the same, choose another folder or remove it")
    step = int(about["step"])
    for name, weight in weights.items():
        weight.data.copy_(tensors[f"weight.{name}"])
        moments = {moment: tensors[f"{moment}.{name}"].to(weight.device) for moment in MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(float(step), device=weight.device), **moments}
    return step, [Point(**point | {"depths": tuple(point["depths"])}) for point in json.loads(about["curve"])]
