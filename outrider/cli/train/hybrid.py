"""`outrider train hybrid`: the model with some of its attention layers turned into recurrent ones, and taught by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Device, Model
from outrider.cli.output import Json, check_folder, check_json, emit, out, progress_bar
from outrider.cli.shell import STDOUT, resumable
from outrider.cli.train.options import Dtype, Text, check_folders, numbers, one_process


@resumable()
def hybrid(
    text: Text,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the model goes, and resumes from.")],
    model: Model = "smollm2",
    layers: Annotated[str, typer.Option("--layers", help="That become recurrent: 2,5,8; empty: every third.")] = "",
    align: Annotated[
        int, typer.Option("--align", help="Updates of each such layer by itself, before the whole.")
    ] = 300,
    steps: Annotated[int, typer.Option("--steps", help="Updates of the whole.")] = 3000,
    batch: Annotated[int, typer.Option("--batch", help="Sequences an update.")] = 16,
    rate: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 1e-3,
    held_out: Annotated[int, typer.Option("--held-out", help="Sequences that only measure.")] = 32,
    save_every: Annotated[float, typer.Option("--save-every", help="Least minutes between checkpoints.")] = 2.0,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Turn attention layers of a Llama-like model into Mamba-2 layers, and distil them on text the model wrote.

    The folder then loads like any other model, to decode with, or to draft for the model that it was made of.
    """
    check_json(json)
    check_folder(folder, ("model.safetensors", "config.json"), ("hybrid.json", "aligned"))
    chosen = tuple(int(number) for number in numbers("--layers", layers)) if layers else ()
    from outrider.models import load_model
    from outrider.train.hybrid import HybridPlan, train_hybrid
    from outrider.train.text.selfdata import read_data

    one_process("hybrid")
    check_folders(text)
    target = load_model(model, device=device, dtype=dtype)
    plan = HybridPlan(layers=chosen, align=align, steps=steps, batch=batch, lr=rate, held_out=held_out)
    with progress_bar() as show:
        _, told = train_hybrid(
            target, read_data(text, target.fingerprint), plan, folder, save_every=60 * save_every,
            on_progress=lambda step, of, point: show(step, of, f"agrees with the model: {point.greedy:.1%}"),
        )  # fmt: skip
    if json != STDOUT:
        out().print(f"{folder}: layers {', '.join(map(str, told['layers']))} are recurrent")
        for stage in ("aligned", "distilled"):
            facts = told[stage]
            out().print(f"{stage}: agrees with the model {facts['greedy']:.1%} greedy, {facts['sampled']:.1%} drawn")
    emit(json, {"folder": str(folder), **told})
