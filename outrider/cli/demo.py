"""`outrider demo`: the same prompt by plain and by speculative decoding, side by side on the embedded model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.cli.options import ModelOptions
from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT, on_interrupt

if TYPE_CHECKING:
    from outrider.core.generation import Generation

PROMPTS = ("rename-variable", "tides")  # one where copying helps, one ordinary question
HINTS = """Next:
  outrider generate "Write a haiku about rain" --stats --show
  outrider chat
  outrider methods --options
  outrider --help"""


@dataclass(slots=True)
class _Side:
    """One column: what has been written so far by one method."""

    method: str
    text: str = ""
    seconds: float = 0.0
    generation: Generation | None = None

    def panel(self) -> Panel:
        g = self.generation
        note = f"{g.stats.tokens_per_s:.1f} tokens/s" if g else f"{self.seconds:.1f} s"
        return Panel(Text(self.text), title=self.method, subtitle=note, border_style="green" if g else "dim")


def demo(
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Length of each text.")] = 160,
    json: Json = None,
    *,
    model: ModelOptions,
) -> None:
    """Show plain and speculative decoding of the same prompts side by side: same text, less time."""
    check_json(json)
    from outrider.core.params import SamplingParams
    from outrider.store.prompts import built_in_prompts

    params = SamplingParams(max_new_tokens=max_new_tokens)
    prompts = {p.id: p for p in built_in_prompts()}
    rows: list[dict[str, Any]] = []
    with model.load() as engine:
        methods = ("plain", model.method)
        for method in methods:  # one-time costs are no part of the comparison
            engine.submit(prompts[PROMPTS[0]].conversation(), params.with_(max_new_tokens=8), method=method).results()
        for name in PROMPTS:
            sides = _race(engine, prompts[name].conversation(), params, methods, silent=json == STDOUT)
            rows += _rows(name, *(s.generation for s in sides if s.generation))
            if any(s.generation and s.generation.finish_reason == "cancelled" for s in sides):
                break
    if json != STDOUT:
        out().print(_table(rows))
        out().print(HINTS, markup=False)
    emit(json, {"model": model.model, "rows": rows})
    if any(row["finish_reason"] == "cancelled" for row in rows):
        raise typer.Exit(130)


def _race(engine: Any, messages: Any, params: Any, methods: tuple[str, ...], silent: bool) -> list[_Side]:
    """One method after the other, so that neither disturbs the other's time."""
    console = out()
    asked = Panel(Text(messages[-1]["content"]), title="prompt", border_style="dim")
    if not silent:
        console.print(asked)
    sides = [_Side(method) for method in methods]
    live = Live(_columns(sides), console=console, auto_refresh=False)
    animated = console.is_terminal and not silent
    if animated:
        live.start()
    try:
        for side in sides:
            _fill(
                engine,
                messages,
                params,
                side,
                (lambda: live.update(_columns(sides), refresh=True)) if animated else None,
            )
            if side.generation and side.generation.finish_reason == "cancelled":
                break
    finally:
        if animated:
            live.stop()
    if not silent and not animated:
        console.print(_columns(sides))
    return sides


def _fill(engine: Any, messages: Any, params: Any, side: _Side, refresh: Any) -> None:
    handle = engine.submit(messages, params, method=side.method)
    begun = shown = time.perf_counter()
    with on_interrupt(handle.cancel):
        for piece in handle.pieces():
            side.text += piece
            side.seconds = time.perf_counter() - begun
            if refresh and time.perf_counter() - shown > 0.1:
                shown = time.perf_counter()
                refresh()
        side.generation = handle.result()
    if refresh:
        refresh()


def _columns(sides: list[_Side]) -> Table:
    grid = Table.grid(expand=True)
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*(side.panel() for side in sides))
    return grid


def _rows(name: str, plain: Generation, *others: Generation) -> list[dict[str, Any]]:
    """A method's speed-up is of decode time only, and only for the same text."""
    rows = []
    for g in (plain, *others):
        s = g.stats
        rows.append({
            "prompt": name, "method": s.method, "new_tokens": s.new_tokens, "tokens_per_s": s.tokens_per_s,
            "mean_accepted": s.mean_accepted, "identical": g.token_ids == plain.token_ids,
            "speedup": s.tokens_per_s / plain.stats.tokens_per_s if plain.stats.tokens_per_s else 0.0,
            "ttft_ms": 1e3 * s.first_token_s, "finish_reason": str(g.finish_reason), "text": g.text,
        })  # fmt: skip
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE)
    for name in ("prompt", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "tokens/s", "accepted\nlength", "identical", "speed-up"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            r["prompt"], r["method"], str(r["new_tokens"]), f"{r['tokens_per_s']:.1f}", f"{r['mean_accepted']:.2f}",
            "yes" if r["identical"] else "[red]no[/]", f"{r['speedup']:.2f}x",
        )  # fmt: skip
    return table
