"""Drafters of every kind for a small target, as they are before training: exactness asks for no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider import methods
from outrider.models import LoadedModel
from outrider.train.kinds.registry import KINDS, find_kind, plan_of, train_drafter
from outrider.train.text.selfdata import DataPlan, SelfData, write_data

TRAINED = [name for name in KINDS if any(option.name == "drafter" for option in methods.find(name).option_list)]


def some_text(target: LoadedModel, folder: Path) -> SelfData:
    return write_data(target, DataPlan(tokens=16 * 24, length=24, batch=16, about_every=0), folder)


def drafter(kind: str, target: LoadedModel, text: SelfData, folder: Path, **settings: Any) -> Path:
    """A folder with a drafter of this kind; `steps=0` unless told."""
    plan = plan_of(find_kind(kind), {"steps": 0, "batch": 4, "held_out": 4, **settings})
    train_drafter(kind, target, text, plan, folder)
    return folder
