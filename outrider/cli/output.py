"""Where results go: JSON to standard output or a file, tables to the terminal, statistics the same on every surface."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.shell import STDOUT
from outrider.errors import InputError
from outrider.files import write_atomic

if TYPE_CHECKING:
    from outrider.generation import Stats

FILE_WIDTH = 120

Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="JSON to FILE, or to standard output, which then holds only JSON."),
]

Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="A page with plots, of one file.")]


def out() -> Console:
    """Results. Made when needed, so that a redirected standard output is seen; a file has room for wide tables."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def err() -> Console:
    """Everything that is not the result."""
    return Console(stderr=True, highlight=False)


def emit(target: str | None, payload: Any) -> None:
    """Write `payload` where --json asked; nothing when it was not given."""
    if target is None:
        return
    content = json.dumps(_finite(payload), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        sys.stdout.write(content)
        sys.stdout.flush()
        return
    write_atomic(Path(target), content)


def check_json(target: str | None) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if target in (None, STDOUT):
        return
    path = Path(str(target))
    if path.is_dir():
        raise InputError(f"--json {target}: is a folder; give a file name in it")
    if not path.parent.is_dir():
        raise InputError(f"--json {target}: the folder {path.parent} does not exist; create it first")


def check_html(html: str | None) -> Path | None:
    """What would stop the page from being written is said before the work, not after it."""
    if html is None:
        return None
    from outrider.bench.plots import check_matplotlib

    check_matplotlib()
    path = Path(html)
    if path.is_dir():
        raise InputError(f"--html {html}: is a folder; give a file name in it")
    if not path.parent.is_dir():
        raise InputError(f"--html {html}: the folder {path.parent} does not exist; create it first")
    return path


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """On standard error, where that is a terminal: done, total, what is being done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = err()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    # Drawn between runs only: a thread that draws by itself would take time from what is measured.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def on_progress(done: int, total: int, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=doing or None, refresh=True)

        yield on_progress


def _finite(value: Any) -> Any:
    """JSON has no infinities: a probability of zero becomes null."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def status_line(stats: Stats) -> str:
    """The one-line form: what a chat shows after each answer."""
    return (
        f"{stats.new_tokens} tokens · {stats.tokens_per_s:.1f} tokens/s · "
        f"accepted length {stats.mean_accepted:.2f} · {stats.method}"
    )


def stats_table(stats: Stats, **extra: object) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    depths = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth)
    rows: dict[str, object] = {
        "method": stats.method,
        "tokens": f"{stats.new_tokens} new after {stats.prompt_tokens} of the prompt",
        "speed": f"{stats.tokens_per_s:.1f} tokens/s, first token after {1e3 * stats.first_token_s:.0f} ms",
        "accepted length": f"{stats.mean_accepted:.2f} tokens a step over {stats.steps} steps",
        "acceptance by depth": depths or "nothing drafted",
        "drafted": f"{stats.drafted} candidates, {stats.wasted} of them wasted",
        "time": f"draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s, rest {stats.rest_s:.2f} s",
        **extra,
    }
    if stats.drafter_failures:
        rows["drafter failures"] = stats.drafter_failures
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table
