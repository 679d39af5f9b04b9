"""`outrider check`: the losslessness gate. The exit status is the verdict, the JSON the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.cli.options import ModelOptions, parse_options
from outrider.cli.output import Json, check_json, emit, err, out
from outrider.cli.shell import STDOUT

if TYPE_CHECKING:
    from outrider.check.report import Report

COLOURS = {"passed": "green", "caught": "green", "same output": "green", "refuted": "red", "missed": "red"}


def check(
    quick: Annotated[bool, typer.Option("--quick", help="A minute or two instead of a quarter of an hour.")] = False,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="JSONL prompts instead of the built-in ones.")
    ] = None,
    plant_bug: Annotated[
        str | None,
        typer.Option("--plant-bug", metavar="[NAME]", help="Show that the gate catches this bug; alone: all of them."),
    ] = None,
    constraint: Annotated[
        str | None, typer.Option("--constraint", help="Of texts of a form: json, regex or copy (of the prompt).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of every sampled text.")] = 1,
    json: Json = None,
    model: ModelOptions = ModelOptions(),
) -> None:
    """Prove or refute that a method gives the same output as plain decoding.

    Exit status 0: the same, as far as the table says. 1: refuted, or a planted bug was missed. 2: bad input. 130:
    interrupted, with the evidence so far.
    """
    check_json(json)
    from outrider.check import forms, gate
    from outrider.methods.preflight import check_load
    from outrider.models import load_model
    from outrider.store.prompts import read_prompts

    planted = forms.named(plant_bug, constraint is not None) if plant_bug is not None else []
    if constraint is not None:
        forms.find_form(constraint)
    options = parse_options(model.option)
    check_load(
        model.method, options, device=model.device, memory=model.memory, runtime=model.runtime,
        precision=model.precision,
    )  # fmt: skip
    asked = read_prompts(prompts) if prompts else None
    size = gate.QUICK if quick else gate.FULL
    loaded = load_model(
        model.model, device=model.device, dtype=model.dtype, revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        bar = progress.add_task("starting", total=gate.planned_tokens(size, planted))
        report = gate.check(
            loaded, model.method, options, prompts=asked, bugs=planted, size=size, seed=seed, runtime=model.runtime,
            precision=model.precision, constraint=constraint,
            watch=lambda label, tokens: progress.update(bar, description=gate.proved(label), advance=tokens),
        )  # fmt: skip
    if json != STDOUT:
        _print(report)
    emit(json, report.as_dict())
    if report.status:
        raise typer.Exit(report.status)


def _print(report: Report) -> None:
    console, s = out(), report.settings
    title = f"{s['method']} on {s['model']} in {s['precision']} by {s['runtime']}"
    title += f", texts of the form {s['constraint']}" if s["constraint"] else ""
    title += ", rows with the same bits in any pass" if s.get("same_bits") else ""
    table = Table("part", "outcome", "what was found", "seconds", title=title)
    for part in report.parts:
        table.add_row(part.name, _coloured(part.outcome), part.summary, f"{part.seconds:.0f}")
    console.print(table)
    if report.bugs:
        table = Table("planted bug", "outcome", "caught by", "what was found")
        for planted in report.bugs:
            found = [part.summary for part in planted.parts if part.name in planted.caught_by]
            notes = "\n".join([*found, *([planted.reason] if planted.reason else [])])
            table.add_row(planted.bug.name, _coloured(planted.outcome), ", ".join(planted.caught_by), notes)
        console.print(table)
    console.print(f"verdict: [bold]{_coloured(report.verdict)}[/]")
    if report.hint:
        console.print(f"[yellow]{escape(report.hint)}[/]")


def _coloured(outcome: str) -> str:
    colour = COLOURS.get(outcome, "yellow")
    return f"[{colour}]{outcome}[/]"
