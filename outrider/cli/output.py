"""Where results go: JSON to standard output or a file, tables to the terminal, statistics the same on every surface."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider._version import __version__
from outrider.cli.shell import STDOUT, forced
from outrider.core.errors import InputError
from outrider.core.files import check_place, write_atomic

if TYPE_CHECKING:
    from outrider.core.generation import Stats

FILE_WIDTH = 120
OUR_JSON = '{\n  "outrider": '  # how a file of ours begins
OUR_PAGE = "<title>Outrider: "  # among the first characters of a page of ours
HEAD = 1024  # so many

Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]",
        help="JSON to FILE (over any other than ours with --force), or to standard output, which then holds only JSON.",
    ),
]  # fmt: skip

Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="A page with plots, of one file.")]


class FittingConsole(Console):
    """Shows a table line by line where the terminal is too narrow for its words, instead of cutting them off."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(self._fitted(one) if isinstance(one, Table) else one for one in objects), **options)

    def _fitted(self, table: Table) -> RenderableType:
        for column in table.columns:
            column.overflow = "fold"
        if Measurement.get(self, self.options.update(max_width=FILE_WIDTH * 10), table).minimum <= self.width:
            return table
        lines: list[RenderableType] = [table.title] if table.title else []
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            for i, (column, cell) in enumerate(zip(table.columns, cells, strict=True)):
                text = self.render_str(cell) if isinstance(cell, str) else cell
                if text:
                    head = Text(f"{column.header}: " if column.header else "", style="dim", overflow="fold")
                    line = head.append_text(text) if isinstance(text, Text) else Group(head, text)
                    lines.append(Padding(line, (0, 0, 0, 2 * (i > 0))))
        return Group(*lines)


def out() -> Console:
    """Results. Made when needed, so that a redirected standard output is seen; a file has room for wide tables."""
    return FittingConsole(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def err() -> Console:
    """Everything that is not the result."""
    return FittingConsole(stderr=True, highlight=False)


def emit(target: str | None, payload: Any) -> None:
    """Write `payload` where --json asked, as an object that says which version wrote it; a list becomes its rows.

    Nothing when --json was not given.
    """
    if target is None:
        return
    facts = payload if isinstance(payload, dict) else {"rows": payload}
    marked = {"outrider": __version__, **facts}
    content = json.dumps(_finite(marked), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        sys.stdout.write(content)
        sys.stdout.flush()
        return
    write_atomic(Path(target), content)


def give(
    figures: Any, table: RenderableType, render: Callable[[Any], str], json: str | None, page: Path | None
) -> None:
    """Figures of a measurement where they were asked for: a table, JSON, and a page that `render` makes of them."""
    if json != STDOUT:
        out().print(table)
    emit(json, figures)
    if page is not None:
        write_atomic(page, render(figures))


def check_json(target: str | None) -> None:
    """Refuse a file that cannot be written, or that is not ours, before the work, not after it."""
    if target not in (None, STDOUT):
        _check_file("--json", str(target), lambda head: head.startswith(OUR_JSON))


def check_html(html: str | None) -> Path | None:
    """What would stop the page from being written is said before the work, not after it."""
    if html is None:
        return None
    from outrider.bench.plots import check_matplotlib

    check_matplotlib()
    _check_file("--html", html, lambda head: OUR_PAGE in head)
    return Path(html)


def check_page(option: str, target: str) -> Path:
    """Refuse a file that cannot be written, or that is no page of ours, before the work."""
    _check_file(option, target, lambda head: OUR_PAGE in head)
    return Path(target)


def check_folder(folder: Path, writes: Sequence[str], ours: Sequence[str]) -> None:
    """Refuse to overwrite files of a folder in which no file of `ours` says that a run of ours made them."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: is a file; give a folder")
    found = [path.name for name in writes for path in sorted(folder.glob(name))]
    if found and not any((folder / name).exists() for name in ours) and not forced():
        what = f"holds {', '.join(found[:3])}, not of such a run"
        raise InputError(f"--out {folder}: {what}; choose another folder, or add --force to overwrite")


def _check_file(option: str, target: str, ours: Callable[[str], bool]) -> None:
    path, name = Path(target), f"{option} {target}"
    check_place(path, name)
    if forced() or not path.exists():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror}); choose another file") from None
    if head and not ours(head):
        raise InputError(f"{name}: exists and is no result of Outrider; choose another file, or add --force")


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


def bytes_text(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def start_rows(engine: Any) -> dict[str, str]:
    """What the start of an engine took, and what it holds in memory, as rows of a table."""
    took = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in engine.phases.items() if seconds >= 0.005)
    holds = ", ".join(f"{name} {bytes_text(count)}" for name, count in engine.footprint().items() if count)
    return {"start": took, "memory": holds}


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
