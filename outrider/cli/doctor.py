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
    from outrider.runtime.choice import AUTO, RUNTIMES

    device, findings = default_device(), list(report())
    for runtime in RUNTIMES.values():
        why = runtime.obstacle(device, runtime.precision)
        precisions = f" ({', '.join(runtime.precisions)})" if runtime.precisions else ""
        tried = "auto takes it where a trial finds it the fastest" if runtime.measured else ""
        taken = tried if runtime.name in AUTO else f"by name: --runtime {runtime.name}"
        state = State.NOTE if why else State.OK
        findings.append(Finding(f"runtime {runtime.name}", state, runtime.summary + precisions, why or taken))
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
