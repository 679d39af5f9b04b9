"""Two results of a bench, side by side: what became faster or slower, and what is only noise.

Systems are matched by section and label. Absolute speeds compare runs on one machine only, so the verdict is on the
speed-up over plain decoding of the same runtime: a change counts where the two 95% intervals do not meet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape as plain
from rich.text import Text

from outrider.bench.report import number, rich_table, same, times
from outrider.core.errors import InputError
from outrider.store.prompts import read_text

Figures = Mapping[str, Any]
COLUMNS = ("section", "system", "speed-up before", "after", "change", "tokens/s before", "after", "accepted", "verdict")


def load(path: str | Path) -> dict[str, Any]:
    """The JSON of `outrider bench` or `outrider compare`."""
    content = read_text(path)
    try:
        data = json.loads(content)
    except ValueError:
        raise InputError(f"{path}: is not JSON; give the results.json of a bench") from None
    if isinstance(data, dict) and "methods" in data:
        return {"sections": [{"name": "comparison", **data}], "machine": data["machine"]}
    if not isinstance(data, dict) or "sections" not in data:
        raise InputError(f"{path}: holds no results of a bench; give the results.json of one")
    return data


def diff(before: Figures, after: Figures) -> dict[str, Any]:
    old = {(s["name"], m["method"]): m for s in before["sections"] for m in s["methods"]}
    new = {(s["name"], m["method"]): m for s in after["sections"] for m in s["methods"]}
    rows = [_row(*place, old[place], new[place]) for place in new if place in old]
    return {
        "rows": rows,
        "slower": sum(row["verdict"] == "slower" for row in rows),
        "faster": sum(row["verdict"] == "faster" for row in rows),
        "only_before": [list(place) for place in old if place not in new],
        "only_after": [list(place) for place in new if place not in old],
        "same_machine": _hardware(before) == _hardware(after),
    }


def terminal(result: Figures) -> RenderableType:
    table = rich_table(COLUMNS, range(2, len(COLUMNS) - 1))
    for row in result["rows"]:
        cells = [
            row["section"], row["method"], times(row["before"]), times(row["after"]), number(row["change"]),
            number(row["tokens_per_s_before"], 1), number(row["tokens_per_s_after"], 1),
            f"{number(row['accepted_before'])} > {number(row['accepted_after'])}", row["verdict"],
        ]  # fmt: skip
        style = {"slower": "red", "faster": "green"}.get(row["verdict"])
        table.add_row(*map(plain, cells), style=style)
    parts: list[RenderableType] = [table]
    if not result["same_machine"]:
        parts.append(Text("the machines differ: compare speed-ups, not tokens/s", style="yellow"))
    for name, which in (("only_before", "first"), ("only_after", "second")):
        if result[name]:
            listed = ", ".join(f"{method} ({section})" for section, method in result[name])
            parts.append(Text(f"only in the {which}: {listed}", style="yellow"))
    parts.append(Text(f"{result['faster']} faster, {result['slower']} slower, by intervals that do not meet"))
    return Group(*parts)


def _row(section: str, method: str, old: Figures, new: Figures) -> dict[str, Any]:
    change = new["speedup"] / old["speedup"] if old["speedup"] and new["speedup"] else None
    return {
        "section": section, "method": method, "before": old["speedup"], "after": new["speedup"], "change": change,
        "tokens_per_s_before": old["tokens_per_s"], "tokens_per_s_after": new["tokens_per_s"],
        "accepted_before": old["mean_accepted"], "accepted_after": new["mean_accepted"],
        "same_output_before": same(old), "same_output_after": same(new), "verdict": verdict(old, new),
    }  # fmt: skip


def verdict(old: Figures, new: Figures) -> str:
    if old["identical"] and new["identical"] is False:
        return "output changed"
    a, b = old["speedup_interval"], new["speedup_interval"]
    if a is None or b is None:
        return "unknown"
    return "slower" if b[1] < a[0] else "faster" if b[0] > a[1] else "same"


def _hardware(result: Figures) -> tuple[Any, ...]:
    return tuple(result["machine"].get(name) for name in ("cpu", "cores", "gpus", "torch_threads"))
