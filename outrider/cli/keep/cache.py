"""`outrider cache`: what lies in the user's cache, and how to be rid of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from outrider.cli.output import Json, bytes_text, check_json, emit, out
from outrider.cli.shell import STDOUT
from outrider.core.errors import InputError

app = typer.Typer(no_args_is_help=True, help="What is kept of models on this machine: show it, or clear it.")


@app.command("list")
def list_(json: Json = None) -> None:
    """Packed and converted weights, what is known of models, and times that were measured."""
    from outrider.models.files.cached import entries

    check_json(json)
    found = entries()
    if json != STDOUT:
        table = Table("what", "model", "name", "size", box=None, pad_edge=False)
        for entry in found:
            size = bytes_text(entry.bytes)
            table.add_row(entry.kind, escape(entry.model or "-"), escape(entry.name), size)
        out().print(table if found else "the cache is empty")
        out().print(f"{bytes_text(sum(entry.bytes for entry in found))} in all; outrider cache clear NAME removes")
    emit(json, [{"kind": e.kind, "what": e.what, "model": e.model, "name": e.name, "bytes": e.bytes,
                 "path": str(e.path)} for e in found])  # fmt: skip


@app.command()
def clear(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="A model, a kind, or a name of the list.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of it.")] = False,
    json: Json = None,
) -> None:
    """Remove entries: by model, by kind (native, models, ...), by name, or all. They are made again when needed."""
    from outrider.models.files import cached

    check_json(json)
    if bool(names) == everything:
        raise InputError("name what to clear, as `outrider cache list` shows it, or add --all")
    picked = cached.entries() if everything else cached.chosen(names or [])
    freed = cached.clear(picked)
    if json != STDOUT:
        out().print(f"{len(picked)} entries cleared, {bytes_text(freed)} are free again")
    emit(json, {"cleared": [entry.name for entry in picked], "bytes": freed})
