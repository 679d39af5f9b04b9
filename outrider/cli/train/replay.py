"""`outrider train replay`: text on which a drafter meets its own mistakes again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Device, Model
from outrider.cli.output import Json, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT
from outrider.cli.train.options import Drafter, Dtype, Text, check_folders
from outrider.core.errors import InputError


def replay(
    drafter: Drafter,
    text: Text,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the new text goes.")],
    model: Model = "smollm2",
    prompts: Annotated[int, typer.Option("--prompts", help="Beginnings that are decoded.")] = 256,
    new: Annotated[int, typer.Option("--max-new-tokens", help="Of each.")] = 128,
    length: Annotated[int, typer.Option("--length", help="Tokens of a window.")] = 128,
    block: Annotated[int, typer.Option("--block", help="Tokens drafted a step.")] = 6,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that run together.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of sampled text.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Decode with a drafter and write what fell, to train it on with `outrider train run --from DRAFTER`."""
    check_json(json)
    if min(prompts, new, length, block, batch) < 1:
        raise InputError("--prompts, --max-new-tokens, --length, --block and --batch must be above zero")
    from outrider.models import load_model
    from outrider.train.text.replay import ReplayPlan, write_replay
    from outrider.train.text.selfdata import read_data

    check_folders(text, drafter)
    target = load_model(model, device=device, dtype=dtype)
    plan = ReplayPlan(prompts, new, length, block, batch, temperature, seed)
    with progress_bar() as show:
        made = write_replay(
            target, drafter, read_data(text, target.fingerprint), plan, folder,
            lambda done, of: show(done, of, "decoding"),
        )  # fmt: skip
    if json != STDOUT:
        out().print(f"{folder}: {made['windows']:,} windows of {length} tokens from {made['anchors']:,} anchors")
    emit(json, {"folder": str(folder), **made})
