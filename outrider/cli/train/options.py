"""Options that the commands around `outrider train` have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.output import check_folder
from outrider.core.errors import InputError

Dtype = Annotated[str | None, typer.Option("--dtype", help="Of the target: float32, bfloat16 or float16.")]
Drafter = Annotated[Path, typer.Option("--drafter", metavar="FOLDER", help="Made by `outrider train run`.")]
Text = Annotated[Path, typer.Option("--data", metavar="FOLDER", help="Text made by `outrider train data`.")]


def check_drafter_folder(folder: Path) -> None:
    """Where a drafter goes: files that no training left there stay."""
    from outrider.models.drafts import CARD, WEIGHTS
    from outrider.train.loop import CHECKPOINT, CURVE, PICTURE

    check_folder(folder, (WEIGHTS, CURVE, PICTURE), (CARD, CHECKPOINT))


def numbers(name: str, text: str) -> list[float]:
    """`16,32` as given to the option of that name."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(number >= 0 and math.isfinite(number) for number in found):
        raise InputError(f"{name} {text}: write numbers such as 16,32")
    return found


def check_folders(text: Path | None = None, drafter: Path | None = None) -> None:
    """Refuse folders without text or without a drafter, before a model is loaded."""
    from outrider.models.drafts import read_card
    from outrider.train.text.selfdata import shards_of

    if text is not None:
        shards_of(text)
    if drafter is not None:
        read_card(drafter)


def one_process(command: str) -> None:
    """Refuses to write text under a launcher of several processes."""
    from outrider.train.crew import crew

    if crew().device is not None:
        raise InputError(f"text is written by one process; run `outrider train {command}` without a launcher")
