"""`outrider drafters ...`: the trained drafters on this machine, which methods find by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT
from outrider.core.errors import InputError, UnknownName

if TYPE_CHECKING:
    from outrider.models.kept import Kept

app = typer.Typer(no_args_is_help=True, help="Trained drafters that are kept for your models, and used by default.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="As `outrider drafters list` shows it, or its beginning.")]


@app.command(name="list")
def list_all(
    model: Annotated[str, typer.Option("--model", "-m", help="Only those whose target has this in its name.")] = "",
    json: Json = None,
) -> None:
    """List the drafters by target: kind, size, date and where each is from."""
    check_json(json)
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from outrider.models.kept import all_drafters

    found = sorted((kept for kept in all_drafters() if model in kept.card.target), key=lambda kept: kept.card.target)
    used, rows = set[tuple[str, str]](), list[dict[str, Any]]()
    for kept in found:  # of each target and kind the newest comes first
        key = (kept.card.fingerprint, kept.card.kind)
        rows.append({**_summary(kept), "default": key not in used})
        used.add(key)
    if json != STDOUT:
        table = Table("target", "kind", "name", "size", "date", "from", "default", box=SIMPLE)
        for row in rows:
            size, date = f"{row['bytes'] / 1e6:,.1f} MB", row["date"][:10]
            cells = (row["target"], row["kind"], row["name"], size, date, row["from"], "yes" if row["default"] else "")
            table.add_row(*map(escape, cells))
        out().print(table if rows else "no drafters; make one with: outrider train run")
    emit(json, rows)


@app.command()
def show(name: Name, json: Json = None) -> None:
    """Everything that is known of one drafter: sizes, training, text, acceptance."""
    check_json(json)
    from dataclasses import asdict

    from rich.markup import escape
    from rich.table import Table

    from outrider.models.kept import find_kept

    kept = find_kept(name)
    about = {**_summary(kept), "folder": str(kept.folder), "parameters": kept.parameters, "card": asdict(kept.card)}
    if json != STDOUT:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="dim")
        table.add_column()
        card = kept.card
        recipe = {key: value for key, value in card.recipe.items() if key not in ("data", "published")}
        rows = {
            "name": kept.name, "target": f"{card.target} ({card.fingerprint})", "kind": card.kind,
            "parameters": f"{kept.parameters:,} in {kept.bytes:,} bytes", "date": card.date[:19], "from": about["from"],
            "folder": str(kept.folder), "reads layers": ", ".join(map(str, card.layers)), "config": _said(card.shape),
            "published config": _said(card.recipe.get("published")), "training": _said(recipe),
            "training data": _said(card.recipe.get("data")) or "not known",
            "acceptance": _said(card.acceptance), "licence": card.licence,
        }  # fmt: skip
        for key, value in rows.items():
            if value:
                table.add_row(key, escape(value))
        out().print(table)
    emit(json, about)


@app.command()
def add(
    source: Annotated[str, typer.Argument(metavar="FOLDER_OR_HUB_ID", help="A drafter of ours, or an EAGLE-3 one.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Its target, as for other commands; else the one it names itself.")
    ] = "",
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the target.")
    ] = False,
    json: Json = None,
) -> None:
    """Keep a drafter for its target: a folder of ours, or one published for vLLM, SGLang or `speculators`.

    Names, shapes and settings are checked against the target; what our layer would compute differently is refused.
    """
    check_json(json)
    from dataclasses import replace
    from pathlib import Path

    from outrider.models import load_model
    from outrider.models.drafts import CARD, read_card, read_drafter
    from outrider.models.kept import keep, keep_tensors
    from outrider.models.published import find_published, read_published, target_name

    folder = find_published(source, revision)
    ours = (folder / CARD).is_file()
    named = model or (read_card(folder).target if ours else target_name(folder))
    if not named:
        raise InputError(f"{source}: it does not say which model it drafts for; name it with --model")
    # half the memory, and the fingerprint is the same in any precision
    target = load_model(named, device="cpu", dtype="bfloat16", trust_remote_code=trust_remote_code)
    origin = str(Path(source).expanduser().resolve()) if Path(source).expanduser().is_dir() else source
    if ours:
        read_drafter(folder, target, read_card(folder).kind)
        kept = keep(folder, origin)
    else:
        weights, card = read_published(folder, target)
        kept = keep_tensors(weights, replace(card, origin=origin))
    if json != STDOUT:
        out().print(f"{kept.name}: {kept.card.kind} for {named}; used by default from now on", markup=False)
    emit(json, {**_summary(kept), "folder": str(kept.folder), "parameters": kept.parameters})


@app.command()
def remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = None,
) -> None:
    """Delete a kept drafter."""
    check_json(json)
    from outrider.models.kept import SHIPPED, find_kept
    from outrider.models.kept import remove as delete

    about: dict[str, Any] = {"name": name}
    try:
        kept = find_kept(name)
        if kept.shipped:
            raise InputError(
                f"{kept.name} {SHIPPED} and stays; do without it by naming parts: -o parts=suffix,predicted"
            )
        about = _summary(kept)
    except UnknownName:
        pass  # one that cannot be read has only its name
    if not yes:
        try:
            yes = typer.confirm(f"Delete {about['name']}?", err=True)
        except typer.Abort:
            raise InputError("nothing was deleted; answer y, or give --yes where nobody can be asked") from None
    if yes:
        delete(about["name"])
    if json != STDOUT:
        out().print(f"{about['name']}: {'deleted' if yes else 'kept'}", markup=False)
    emit(json, {**about, "deleted": yes})


def _summary(kept: Kept) -> dict[str, Any]:
    from outrider.models.kept import SHIPPED

    return {
        "name": kept.name, "target": kept.card.target, "fingerprint": kept.card.fingerprint, "kind": kept.card.kind,
        "bytes": kept.bytes, "date": kept.card.date, "from": SHIPPED if kept.shipped else kept.card.origin,
        "shipped": kept.shipped,
    }  # fmt: skip


def _said(value: Any) -> str:
    """Nested settings in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_said(inner)}" for key, inner in value.items() if inner not in ("", None, [], {}, ()))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_said(inner) for inner in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value if value is not None else "")
