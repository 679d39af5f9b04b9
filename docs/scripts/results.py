"""Writes docs/results.md, a page a machine and pictures from docs/results/*.json: a dated table a file.

    python docs/scripts/results.py            # the pages
    python docs/scripts/results.py --draw     # and the pictures, which need matplotlib

A file holds `order` (its place: 10 to 19 on two cores, 20 to 29 on a GPU), `title`, `machine`, `date`,
`about`, `commands`, `columns`, `rows`, `notes`, `log` (the page of the lab with more) and, where there is a picture,
`plot`: the columns that are drawn, and what they count. `gpu-step.json` is what `benchmarks/costs/gpu_step.py` writes;
that program draws its picture, too.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
WIDTH = 118
STEPS = ((1, 1, 1024), (1, 16, 1024), (1, 64, 1024), (1, 64, 8192), (8, 16, 1024), (16, 1, 1024), (16, 16, 1024))


@dataclass(frozen=True)
class Machine:
    first: int  # the first place that is its own
    file: str
    title: str


MACHINES = (Machine(10, "two-cores.md", "Two CPU cores"), Machine(20, "h200.md", "One NVIDIA H200"))
INTRO = """\
A page a machine, a table a question, each with its date and the command that made it. Not measured yet on a machine
that was free for it: several sequences on a GPU, a peer on the GPU, servers under load beside their peers.

Ratios are taken in one run. *Accepted length* is tokens a step, the target's own included; plain decoding has 1.
[How a benchmark measures](guides/measuring/how-it-measures.md) has the protocol, [the lab](lab/index.md) everything
that was tried, with the runs that went worse."""


def pages() -> dict[str, str]:
    """Names of files in docs/ and what belongs into them."""
    found = {file.stem: read(file) for file in (DOCS / "results").glob("*.json")}
    shown = {name: result for name, result in found.items() if "order" in result}  # others are there to be kept
    ordered = sorted(shown.items(), key=lambda one: (one[1]["order"], one[0]))
    index = ["# Results", "", INTRO, ""]
    made = {}
    for machine in MACHINES:
        ours = [(name, result) for name, result in ordered if machine.first <= result["order"] < machine.first + 10]
        made[f"results/{machine.file}"] = "\n".join([f"# {machine.title}", "", *(section(*one) for one in ours)])
        index += [f"## {machine.title}", ""]
        for _, result in ours:
            place = f"results/{machine.file}#{result['title'].lower().replace(' ', '-')}"
            index.append(f"- [{result['title']}]({place}), {result['date']}")
        index.append("")
        index += [f"![{r['title']}](images/{name}.svg)\n" for name, r in ours if "plot" in r]
    return {"results.md": "\n".join(index), **made}


def read(file: Path) -> dict[str, Any]:
    result = json.loads(file.read_text(encoding="utf-8"))
    return of_steps(result) if file.stem == "gpu-step" else result


def section(name: str, result: dict[str, Any]) -> str:
    text = [f"## {result['title']}", "", f"*{result['machine']}, {result['date']}.*", "", _fill(result["about"]), ""]
    text += table(result["columns"], result["rows"])
    if (DOCS / "images" / f"{name}.svg").is_file():
        text += ["", f"![{result['title']}](../images/{name}.svg)"]
    if result["notes"]:
        text += ["", *(_fill(f"- {note}", "  ") for note in result["notes"])]
    if result["commands"]:
        text += ["", "```", *(_command(command) for command in result["commands"]), "```"]
    return "\n".join([*text, "", f"More: [log](../{result['log']}).", ""])


def table(columns: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def of_steps(measured: dict[str, Any]) -> dict[str, Any]:
    """The table of what a step on a GPU costs, from what its benchmark wrote."""
    steps = {(s["batch"], s["rows"], s["context"]): s for s in measured["steps"] if s["runtime"] == "graphs"}
    rows = [
        [
            f"{batch} x {wide}",
            context,
            f"{s['gpu_ms']:.2f}",
            f"{s['floor_ms']:.2f}",
            f"{s['gpu_ms'] / s['floor_ms']:.2f}x",
        ]
        for batch, wide, context in STEPS
        for s in [steps[batch, wide, context]]
    ]
    return {
        "order": 21,
        "title": "What a step costs at 8B shape",
        "machine": "One NVIDIA H200",
        "date": "2026-11-16",
        "about": "A Llama of 8B shape in bfloat16 with random weights, runtime `graphs`, milliseconds of GPU time. The "
        "floor is the larger of weights and cache over the measured bandwidth and arithmetic over the measured rate.",
        "columns": ["sequences x rows", "context", "GPU ms", "floor ms", "over the floor"],
        "rows": rows,
        "notes": [
            "64 rows cost 1.10x of one, so a tree of 63 candidates pays with little acceptance.",
            "The last row is of a busy chip against the rate of a rested one; in like states it is at 1.34x.",
        ],
        "commands": ["python benchmarks/costs/gpu_step.py --json FILE --plot FILE.svg"],
        "log": "lab/runtimes/2026-11-16-gpu-step.md",
    }


def draw(name: str, result: dict[str, Any]) -> None:
    """Bars: a group a row, a bar a column."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = [result["columns"].index(column) for column in result["plot"]["columns"]]
    width = 0.8 / len(columns)
    with rc_context({"svg.hashsalt": "outrider", "font.size": 9}):
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        axes = figure.subplots()
        for at, column in enumerate(columns):
            places = [row + (at - (len(columns) - 1) / 2) * width for row in range(len(result["rows"]))]
            bars = axes.bar(places, [row[column] for row in result["rows"]], width, label=result["columns"][column])
            axes.bar_label(bars, fontsize=7, padding=1)
        axes.set_xticks(range(len(result["rows"])), [str(row[0]).replace("`", "") for row in result["rows"]])
        axes.set_ylabel(result["plot"]["y"])
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(DOCS / "images" / f"{name}.svg", format="svg", metadata={"Date": None})


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _command(command: str) -> str:
    """Over several lines, as a shell takes it; an option stays with its value."""
    kept = command.replace(" --", "\n--").replace(" ", "\0").replace("\n", " ")
    lines = textwrap.wrap(kept, WIDTH - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\0", " ")


if __name__ == "__main__":
    if "--draw" in sys.argv:
        for file in sorted((DOCS / "results").glob("*.json")):
            if "plot" in (result := read(file)):
                draw(file.stem, result)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
