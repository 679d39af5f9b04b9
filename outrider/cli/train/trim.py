"""`outrider train trim`: the same drafter with a smaller head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Device, Model
from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT
from outrider.cli.train.options import Drafter, Dtype, Text, check_drafter_folder, check_folders
from outrider.core.errors import InputError


def trim(
    drafter: Drafter,
    text: Text,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the smaller one goes.")],
    model: Model = "smollm2",
    vocab: Annotated[int, typer.Option("--vocab", help="Tokens it can say: those that answers use most; 0: all.")] = 0,
    rank: Annotated[int, typer.Option("--rank", help="Head of two matrices of this rank; 0: of one.")] = 0,
    look_for: Annotated[bool, typer.Option("--search", help="Search the number of tokens.")] = False,
    timed: Annotated[bool, typer.Option("--timed", help="Weigh seconds on this machine, not operations.")] = False,
    weight: Annotated[float, typer.Option("--weight", help="Of coverage against the cut in cost: 0 to 1.")] = 0.7,
    least: Annotated[float, typer.Option("--least-coverage", help="Share of answer tokens it must say.")] = 0.95,
    trials: Annotated[int, typer.Option("--trials", help="Of the search.")] = 100,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Give a drafter a smaller head: fewer tokens, a lower rank, or both. Nothing is trained; drafting gets cheaper.

    `outrider train run --from DRAFTER` trains it on.
    """
    check_json(json)
    check_drafter_folder(folder)
    if min(vocab, rank) < 0 or not (0 <= weight <= 1 and 0 <= least <= 1) or trials < 1:
        raise InputError("--vocab and --rank are 0 or more, --weight and --least-coverage 0 to 1, --trials above zero")
    if vocab and look_for:
        raise InputError("--vocab and --search both say how many tokens; give one of them")
    from outrider.models import load_model
    from outrider.train.kinds.heads import HeadPlan, make_head
    from outrider.train.reshape.trim import SearchPlan
    from outrider.train.text.selfdata import read_data

    check_folders(text, drafter)
    target = load_model(model, device=device, dtype=dtype)
    searching = SearchPlan(weight=weight, least_coverage=least, trials=trials)
    plan = HeadPlan(vocab, rank, look_for, timed, searching=searching)
    whole, made, found = make_head(drafter, target, read_data(text, target.fingerprint), plan, folder)
    if json != STDOUT:
        from rich.table import Table

        table = Table("head", "tokens", "rank", "coverage", "MB", "ms a level", "greedy", "drawn", "chain")
        for name, row in (("before", whole), ("now", made)):
            table.add_row(name, f"{row.vocab:,}", str(row.rank or "full"), f"{row.coverage:.3f}",
                          f"{row.megabytes:.1f}", f"{row.milliseconds:.2f}", f"{row.greedy:.3f}", f"{row.sampled:.3f}",
                          f"{row.chain:.2f}")  # fmt: skip
        out().print(table)
        if found and not found.feasible:
            out().print(f"no size in range covers {least:g}; took the fewest tokens that do: {found.size:,}")
    search = {"size": found.size, "utility": found.utility, "feasible": found.feasible} if found else None
    emit(json, {"folder": str(folder), "before": whole.as_dict(), "now": made.as_dict(), "search": search})
