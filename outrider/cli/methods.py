"""`outrider methods`: the table of named methods."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT


def methods(
    options: Annotated[bool, typer.Option("--options", help="Also list every method's own options.")] = False,
    json: Json = None,
) -> None:
    """List the methods: paper, family, whether the output is provably unchanged, what each needs."""
    check_json(json)
    from outrider.methods import table

    known = table()
    if json != STDOUT:
        grid = Table("method", "family", "lossless", "needs", "paper", box=SIMPLE)
        for m in known:
            what = f"[bold]{m.name}[/]\n[dim]{escape(m.summary)}[/]"
            grid.add_row(what, m.family, "yes" if m.lossless else "[red]no[/]", escape(m.needs), escape(m.paper))
        out().print(grid)
        if options:
            listed = Table("method", "option", "type", "default", "meaning", box=SIMPLE)
            for m in known:
                for o in m.option_list:
                    listed.add_row(*map(escape, (m.name, o.name, o.type, repr(o.default), o.help)))
            out().print(listed)
    emit(json, [m.as_dict() for m in known])
