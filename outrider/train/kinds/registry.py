"""The kinds of drafters that can be trained: one entry each, and the one way in which all of them are.

A kind is a module of this folder with a plan (its settings, a dataclass on top of `LoopPlan`) and a function that makes
its learner; it is imported when it is wanted. A finished drafter is used by the method of the same name, an acceptance
head by those whose chains end where it says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import InputError, UnknownName, did_you_mean

if TYPE_CHECKING:
    from outrider.models import LoadedModel
    from outrider.train.loop import LoopPlan, Point, Progress, Trainee
    from outrider.train.text.selfdata import SelfData

    Begin = Callable[[LoadedModel, SelfData, Any, Path | None], Trainee]  # the last: a finished drafter to go on from


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    summary: str
    module: str  # of outrider.train.kinds
    plan_name: str
    begin_name: str
    measured: tuple[str, str] = ("greedy", "drawn")  # what a point's two rates of acceptance are

    @property
    def plan(self) -> type[LoopPlan]:
        return getattr(self._loaded(), self.plan_name)

    @property
    def begin(self) -> Begin:
        return getattr(self._loaded(), self.begin_name)

    @property
    def settings(self) -> dict[str, dataclasses.Field[Any]]:
        return {field.name: field for field in dataclasses.fields(self.plan)}

    def _loaded(self) -> Any:
        return importlib.import_module(f"outrider.train.kinds.{self.module}")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("eagle3", "a layer over three of the target's, trained on its own states", "eagle3", "Eagle3Plan",
             "eagle3_learner"),
        Kind("eagle2", "a layer that guesses the target's next top feature; more steps and topk make it HASS", "eagle2",
             "Eagle2Plan", "eagle2_learner"),
        Kind("fspad", "eagle2 with features sampled by the drawn token and logits freed from the guess", "fspad",
             "FspadPlan", "fspad_learner"),
        Kind("medusa", "heads that each guess one token further ahead", "medusa", "HeadsPlan", "medusa_learner"),
        Kind("hydra", "heads that are told the tokens drafted before", "hydra", "HeadsPlan", "hydra_learner"),
        Kind("ppd", "vectors that make the target itself say what comes later; trained in minutes", "prompt_rows",
             "PromptRowsPlan", "prompt_rows_learner"),
        Kind("dflash", "a few layers that fill a whole block of masks in one pass, over the target's states", "dflash",
             "DFlashPlan", "dflash_learner"),
        Kind("deer", "some of the target's layers, made to fill masks behind a text, in two stages", "deer",
             "DeerPlan", "deer_learner"),
        Kind("kangaroo", "an attention layer behind the target's first layers, which draft until they doubt",
             "kangaroo", "KangarooPlan", "kangaroo_learner"),
        Kind("draft-model", "some of the target's layers, or a small model from scratch", "draft_model",
             "DraftModelPlan", "draft_model_learner"),
        Kind("acceptance-head", "says of each token that a drafter drafted how likely it is to be accepted (SpecDec++)",
             "acceptance_head", "AcceptancePlan", "acceptance_learner", ("actual", "foreseen")),
    )
}  # fmt: skip


def find_kind(name: str) -> Kind:
    if name not in KINDS:
        raise UnknownName(f"unknown kind {name!r}; {did_you_mean(name, KINDS)}known kinds: {', '.join(KINDS)}")
    return KINDS[name]


def plan_of(kind: Kind, given: Mapping[str, Any]) -> LoopPlan:
    """The kind's settings from Python values or text; what it does not have or cannot use is refused."""
    from outrider.train.loop import check_plan

    hints, values = typing.get_type_hints(kind.plan), {}
    for name, value in given.items():
        if name not in kind.settings:
            having = [other.name for other in KINDS.values() if name in other.settings]
            whose = f" (a setting of {', '.join(having)})" if having else ""
            hint = did_you_mean(name, kind.settings)
            known = ", ".join(kind.settings)
            raise InputError(f"kind {kind.name} has no setting {name!r}{whose}; {hint}its own: {known}")
        values[name] = _convert(name, value, hints[name])
    plan = kind.plan(**values)
    check_plan(plan)
    return plan


def _convert(name: str, value: Any, wanted: Any) -> Any:
    try:
        if typing.get_origin(wanted) is tuple:  # 2,15,27
            return tuple(int(part) for part in str(value).split(",")) if isinstance(value, str | int) else tuple(value)
        if wanted is bool and isinstance(value, str):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        if wanted is int and isinstance(value, float) and value != int(value):
            raise ValueError
        return wanted(value)
    except (TypeError, ValueError, KeyError):
        several = typing.get_origin(wanted) is tuple
        known = "list of numbers such as 2,15,27" if several else getattr(wanted, "__name__", wanted)
        raise InputError(f"setting {name} is {value!r}; it must be a {known}") from None


def work_folder(kind: str, target: LoadedModel, data: SelfData, plan: LoopPlan, begin: Path | None) -> Path:
    """Where a run without a folder of its own keeps its checkpoints: the same for the same run, so that it resumes."""
    from outrider.models.kept import drafters_folder
    from outrider.train.text.selfdata import digest

    about = json.dumps([kind, dataclasses.asdict(plan), digest(data), str(begin or "")])
    name = f"{target.fingerprint}-{kind}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"
    return drafters_folder().parent / "training" / name


def train_drafter(
    kind: str, target: LoadedModel, data: SelfData, plan: LoopPlan, folder: Path, *,
    on_progress: Progress = lambda step, of, point: None,
    save_every: float = 120.0,  # seconds
    measure_every: int = 100,  # steps
    recipe: dict[str, Any] | None = None,  # said in the card besides the plan
    licence: str = "",
    begin: Path | None = None,  # a finished drafter to go on from, instead of an untrained one
) -> tuple[Any, list[Point]]:  # fmt: skip
    """Train, resuming what `folder` holds, and leave the finished drafter there with its curve; its learner."""
    from outrider.models.drafts import DraftCard, write_drafter
    from outrider.train.crew import crew
    from outrider.train.loop import finish, prepare, train

    prepare(plan, data, folder)
    together = crew()
    learner = find_kind(kind).begin(target, data, plan, begin)
    about = {"kind": kind, "target": target.fingerprint, "shape": learner.shape, "begin": str(begin or "")}
    curve = train(
        learner, data, plan, folder, about,
        on_progress=on_progress, save_every=save_every, measure_every=measure_every, together=together,
    )  # fmt: skip
    last = curve[-1]
    rates = {"greedy": last.greedy, "sampled": last.sampled}
    card = DraftCard(
        target.name, target.fingerprint, learner.layers, {**dataclasses.asdict(plan), **(recipe or {})},
        {"held-out": rates | ({"greedy by depth": last.depths} if last.depths else {})}, licence, kind, learner.shape,
    )  # fmt: skip
    if together.first:
        write_drafter(folder, learner.stored(), card)
        finish(folder, curve)
    together.wait()
    return learner, curve
