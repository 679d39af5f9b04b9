"""What a step costs: time against rows, batch and context for a target, next to the floor of reading it once.

The curve is the one that cost-aware drafting uses (`control/cost.py`); the floor divides the bytes of weights and cache
by the bandwidth measured at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from outrider.bench.floor import bandwidth, floor_seconds, runtime_traffic
from outrider.bench.machine import machine
from outrider.bench.report import html_table, on_machine, page, paragraphs, pictures, rich_table
from outrider.control.cost import measure
from outrider.runtime.choice import ran

if TYPE_CHECKING:
    from outrider.api import Outrider

ROWS = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = ("batch", "context", "rows a sequence", "ms a step", "of one row", "floor ms", "floor reached")


def measured_steps(
    engine: Outrider, rows: Sequence[int] = ROWS, batches: Sequence[int] = (1,), contexts: Sequence[int] = (128,),
    repeats: int = 5,
) -> dict[str, Any]:  # fmt: skip
    """Times the engine's own target; the slots it takes are given back."""
    rate = bandwidth(engine.target.device)
    curve = measure(engine.target, rows, batches, contexts, repeats)
    facts = runtime_traffic(engine)
    table = []
    for b, batch in enumerate(curve.batches):
        for c, context in enumerate(curve.contexts):
            for r, count in enumerate(curve.rows):
                seconds = curve.table[b][c][r]
                floor = floor_seconds(facts, rate, 1, batch * (context + count))
                table.append({
                    "batch": batch, "context": context, "rows": count, "seconds": seconds,
                    "over_one_row": seconds / curve.table[b][c][0], "floor_seconds": floor,
                    "floor_share": floor / seconds if floor and seconds else None,
                })  # fmt: skip
    return {
        "model": engine.loaded.name.rpartition("/")[2], "device": str(engine.target.device),
        "runtime": ran(engine.target, engine.loaded.model)["runtime"],
        "bandwidth": rate, **facts, "steps": table, "machine": machine(),
    }  # fmt: skip


def step_rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [str(s["batch"]), str(s["context"]), str(s["rows"]), f"{1e3 * s['seconds']:.2f}", f"{s['over_one_row']:.2f}x",
         "-" if s["floor_seconds"] is None else f"{1e3 * s['floor_seconds']:.2f}",
         "-" if s["floor_share"] is None else f"{100 * s['floor_share']:.0f}%"]
        for s in result["steps"]
    ]  # fmt: skip


def headlines(result: Mapping[str, Any]) -> list[str]:
    weights = f"{result['weight_bytes'] / 1e6:.0f} MB of weights" if result.get("weight_bytes") else "weights unknown"
    by = f" by {result['runtime']}" if "runtime" in result else ""
    return [
        f"{result['model']} in {result['dtype']}{by} on {result['device']} · {weights} · "
        f"bandwidth {result['bandwidth'] / 1e9:.1f} GB/s",
        on_machine(result["machine"]),
    ]


def terminal(result: Mapping[str, Any]) -> RenderableType:
    table = rich_table(COLUMNS, range(len(COLUMNS)))
    for cells in step_rows(result):
        table.add_row(*cells)
    return Group(*(Text(line, style="dim") for line in headlines(result)), table)


def html(result: Mapping[str, Any]) -> str:
    """The page. Needs matplotlib."""
    from outrider.bench.plots import draw, step_costs

    body = [
        f'<div class="facts">{paragraphs(headlines(result))}</div>',
        pictures([("Step time against rows; dashed: the floor", draw(result, step_costs))]),
        html_table(COLUMNS, step_rows(result)),
    ]
    return page("cost of a step", body, result)
