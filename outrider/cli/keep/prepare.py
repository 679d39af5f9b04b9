"""`outrider prepare`: everything that a first start does, before anybody waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from outrider.cli.options import ModelOptions
from outrider.cli.output import Json, bytes_text, check_json, emit, out, start_rows
from outrider.cli.shell import STDOUT, resumable


def prepare(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="smollm2, a hub id, a folder or a .gguf file.", show_default=False),
    ] = None,
    json: Json = None,
    *,
    model: ModelOptions,
) -> None:
    """Fetch, pack, check and time a model now, so that later starts take a moment: for images and services.

    Ctrl-C loses nothing that is finished; the same command goes on from there.
    """
    check_json(json)
    chosen = model if name is None else replace(model, model=name)
    with resumable(), chosen.load() as engine:
        engine.prepare()
        runtime, rows = engine.target.traits, start_rows(engine)
        facts = {"model": chosen.model, "runtime": runtime.runtime, "precision": runtime.precision,
                 "seconds": engine.phases, "bytes": engine.footprint()}  # fmt: skip
    if json != STDOUT:
        held = bytes_text(int(runtime.weight_bytes or 0))
        out().print(f"{chosen.model} is ready: {runtime.runtime} {runtime.precision}, {held} of weights", markup=False)
        for what, said in rows.items():
            out().print(f"{what}: {said}", markup=False, style="dim")
    emit(json, facts)
