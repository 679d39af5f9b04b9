"""Drafters of every kind for a small target, as they are before training: exactness asks for no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider import methods
from outrider.models import LoadedModel
from outrider.train.kinds.registry import KINDS, find_kind, plan_of, train_drafter
from outrider.train.text.selfdata import DataPlan, SelfData, write_data

METHODS = {info.name: info for info in methods.table()}
TRAINED = [name for name in KINDS if name in METHODS and "drafter" in {o.name for o in METHODS[name].option_list}]
JUDGED = {
    "specdec-plus-plus": "acceptance-head"
}  # methods that need a network besides, which judges an EAGLE-3 drafter


def some_text(target: LoadedModel, folder: Path) -> SelfData:
    return write_data(target, DataPlan(tokens=16 * 24, length=24, batch=16, about_every=0), folder)


def drafter(kind: str, target: LoadedModel, text: SelfData, folder: Path, **settings: Any) -> Path:
    """A folder with a drafter of this kind; `steps=0` unless told."""
    plan = plan_of(find_kind(kind), {"steps": 0, "batch": 4, "held_out": 4, **settings})
    train_drafter(kind, target, text, plan, folder)
    return folder


def needed_options(target: LoadedModel, folder: Path, steps: int = 2) -> dict[str, dict[str, str]]:
    """Changes the folder: what methods cannot be built without, by method."""
    text = some_text(target, folder / "text")
    made = {kind: {"drafter": str(drafter(kind, target, text, folder / kind, steps=steps))} for kind in TRAINED}
    for method, kind in JUDGED.items():
        judged = made["eagle3"]["drafter"]
        head = drafter(kind, target, text, folder / kind, steps=steps, drafter=judged)
        made[method] = {"head": str(head), "drafter": judged}
    return made | {"diffuspec": made["deer"]}
