"""`outrider train on-policy`: text whose answers the drafter gives, to learn where its own words lead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Device, Model
from outrider.cli.output import Json, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT, resumable
from outrider.cli.train.options import Drafter, Dtype, Text, check_folders, numbers, one_process
from outrider.core.errors import InputError


@resumable()
def on_policy(
    drafter: Drafter,
    text: Text,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the text goes, and resumes from.")],
    model: Model = "smollm2",
    share: Annotated[
        float, typer.Option("--share", help="Of the sequences: with the drafter's answers. The others stay.")
    ] = 0.5,
    sequences: Annotated[int, typer.Option("--sequences", help="So many of the text's first ones; 0: all.")] = 0,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Of the drafter; the sequences have them in turn. 0 is greedy.")
    ] = "1",
    block: Annotated[int, typer.Option("--block", help="Tokens drafted a step.")] = 6,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that are written together.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of drawn text.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Let a drafter answer the text's users, to train it on with `outrider train run --from DRAFTER` (DistillSpec).

    Run it again after an interruption: it goes on where it was.
    """
    check_json(json)
    if min(block, batch) < 1 or sequences < 0:
        raise InputError("--block and --batch must be above zero, --sequences zero or more")
    drafter_temperatures = tuple(numbers("--temperatures", temperatures))
    from outrider.models import load_model
    from outrider.train.text.on_policy import OnPolicyPlan, write_on_policy
    from outrider.train.text.selfdata import read_data

    one_process("on-policy")
    check_folders(text, drafter)
    target = load_model(model, device=device, dtype=dtype)
    plan = OnPolicyPlan(share, sequences, drafter_temperatures, block, batch, seed=seed)
    with progress_bar() as show:
        made = write_on_policy(
            target, drafter, read_data(text, target.fingerprint), plan, folder,
            lambda done, of: show(done, of, "writing text"),
        )  # fmt: skip
    if json != STDOUT:
        out().print(
            f"{folder}: {made['sequences']:,} sequences, {made['rewritten']:,} of them with the drafter's answers: "
            f"{made['own']:,} of {made['answers']:,} tokens of answers"
        )
    emit(json, {"folder": str(folder), **made})
