"""`outrider doctor`: what is installed, which runtime would be used, and why."""

from __future__ import annotations

from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(json: Json = None) -> None:
    """Look at this machine: packages, devices, caches, and the runtime that would be used."""
    check_json(json)
    from outrider.models.doctor import Finding, State, report
    from outrider.models.load import default_device
    from outrider.runtimes import AUTO, RUNTIMES

    device, findings = default_device(), list(report())
    for own in RUNTIMES.values():
        why = own.obstacle(device, own.precision)
        precisions = f" ({', '.join(own.precisions)})" if own.precisions else ""
        tried = "auto takes it where a trial finds it the fastest" if own.measured else ""
        taken = tried if own.name in AUTO else f"by name: --runtime {own.name}"
        state = State.NOTE if why else State.OK
        findings.append(Finding(f"runtime {own.name}", state, own.summary + precisions, why or taken))
    if json != STDOUT:
        grid = Table.grid(padding=(0, 2))
        for f in findings:
            grid.add_row(
                f"[{COLOURS[f.state]}]{f.state}[/]",
                f"[bold]{f.name}[/]",
                escape(f.value),
                f"[dim]{escape(f.remedy)}[/]",
            )
        out().print(grid)
    emit(json, [asdict(f) for f in findings])
