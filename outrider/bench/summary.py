"""The report of a bench: terminal, Markdown and one self-contained HTML page, all made from its results alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape as plain
from rich.text import Text

from outrider.bench import steps
from outrider.bench.contenders import OURS
from outrider.bench.report import (
    headlines,
    html_table,
    notes,
    number,
    on_machine,
    page,
    paragraphs,
    pictures,
    rich_table,
    same,
    span,
    times,
)

Figures = Mapping[str, Any]
COLUMNS = (
    "system", "tokens/s", "speed-up", "95%", "over best peer", "accepted", "speed-up / accepted", "ttft ms",
    "draft/verify/host %", "peak MB", "of floor", "same output",
)  # fmt: skip
SHORT = ("system", "tok/s", "speed-up", "95%", "/peer", "accepted", "eff.", "ttft", "d/v/h %", "MB", "floor", "same")
LEGEND = (
    "tokens/s and speed-up: decode time only, the median round of each answer, all prompts pooled; speed-up over plain "
    "decoding by the same runtime, with its 95% bootstrap interval over prompts · over best peer: over the fastest "
    "system of another runtime · accepted: tokens a target step, plain is 1 · ttft: time to first token, median · "
    "draft/verify/host: shares of decode time; peers do not tell · peak: memory of the process, weights and what "
    "other methods of the same process hold included · of floor: share of decode time that reading weights and cache "
    "once a step takes at the bandwidth measured in this run · same output: against plain greedy decoding by Outrider"
)
DEPTHS = 8


def terminal(result: Figures) -> RenderableType:
    parts: list[RenderableType] = [Text(on_machine(result["machine"]), style="dim"), Text(_rates(result), style="dim")]
    for section in result["sections"]:
        parts.append(Text(f"\n{section['name']}", style="bold"))
        parts.append(Text(headlines(section)[0], style="dim"))
        table = rich_table(SHORT, range(1, len(SHORT) - 1))
        for row in section["methods"]:
            table.add_row(*map(plain, cells(row)))
        parts.append(table)
        parts += [Text(note, style="yellow") for note in section_notes(section)]
    parts.append(Text(LEGEND, style="dim"))
    return Group(*parts)


def markdown(result: Figures) -> str:
    lines = [on_machine(result["machine"]), "", _rates(result), ""]
    for section in result["sections"]:
        lines += [f"### {section['name']}", "", headlines(section)[0], ""]
        lines += [*_markdown_table(COLUMNS, [cells(row) for row in section["methods"]]), ""]
        if len(groups(section)) > 1:
            lines += ["Speed-up by group:", "", *_markdown_table(*by_group(section)), ""]
        if depths := by_depth(section):
            lines += ["Acceptance by depth:", "", *_markdown_table(*depths), ""]
        lines += [f"- {note}" for note in section_notes(section)] + [""]
    if result["steps"]:
        lines += ["### Cost of a step", "", *_markdown_table(steps.COLUMNS, steps.step_rows(result["steps"])), ""]
    lines += [LEGEND, ""]
    return "\n".join(lines)


def html(result: Figures) -> str:
    """The page. Needs matplotlib."""
    from outrider.bench.plots import bench_plots, draw, section_plots, step_costs

    body = [f'<div class="facts">{paragraphs([on_machine(result["machine"]), _rates(result)])}</div>']
    body += [html_table(*overview(result)), paragraphs([LEGEND], "legend"), pictures(bench_plots(result))]
    for section in result["sections"]:
        body += [
            f"<h2>{escape(section['name'])}</h2>",
            f'<div class="facts">{paragraphs(headlines(section)[:1])}</div>',
            paragraphs(section_notes(section), "note"),
            html_table(COLUMNS, [cells(row) for row in section["methods"]]),
            pictures(section_plots(section)),
        ]
        if len(groups(section)) > 1:
            body += ["<h3>Speed-up by group</h3>", html_table(*by_group(section))]
        if depths := by_depth(section):
            body += ["<h3>Acceptance by depth</h3>", html_table(*depths)]
        body += ["<h3>Systems</h3>", html_table(*about(section))]
    if result["steps"]:
        body += [
            "<h2>Cost of a step</h2>", paragraphs(steps.headlines(result["steps"])[:1]),
            pictures([("Step time against rows; dashed: the floor", draw(result["steps"], step_costs))]),
            html_table(steps.COLUMNS, steps.step_rows(result["steps"])),
        ]  # fmt: skip
    return page("bench", body, result)


def cells(f: Figures) -> list[str]:
    shares = [f["draft_share"], f["verify_share"], f["rest_share"]]
    return [
        f["method"],
        number(f["tokens_per_s"], 1),
        times(f["speedup"]),
        span(f["speedup_interval"]),
        times(f["speedup_over_best_peer"]),
        number(f["mean_accepted"]),
        number(f["efficiency"]),
        number(f["ttft_ms"], 0),
        "-" if None in shares else "/".join(f"{100 * share:.0f}" for share in shares),
        number(f["peak_memory_mb"], 0),
        "-" if f["floor_share"] is None else f"{100 * f['floor_share']:.0f}%",
        same(f) if f["identical"] is not None or f["runtime"] == OURS else "-",
    ]


def overview(result: Figures) -> tuple[list[str], list[list[str]]]:
    """Every system in every section: tokens a second, and the speed-up over plain of its runtime."""
    labels = list(dict.fromkeys(row["method"] for section in result["sections"] for row in section["methods"]))
    table = []
    for label in labels:
        found = [next((r for r in s["methods"] if r["method"] == label), None) for s in result["sections"]]
        table.append([label, *("-" if f is None or f["tokens_per_s"] is None else _pace(f) for f in found)])
    return ["system", *(section["name"] for section in result["sections"])], table


def by_group(section: Figures) -> tuple[list[str], list[list[str]]]:
    rows = [
        [row["method"], *(_with_span(row["groups"][group]) for group in groups(section))] for row in section["methods"]
    ]
    return ["system", *groups(section)], rows


def by_depth(section: Figures) -> tuple[list[str], list[list[str]]] | None:
    rows = [
        [row["method"], *(f"{rate:.2f}" for rate in row["acceptance_by_depth"][:DEPTHS])] for row in section["methods"]
    ]
    rows = [row for row in rows if len(row) > 1]
    width = max(map(len, rows), default=1)
    filled = [row + [""] * (width - len(row)) for row in rows]
    return (["system", *(str(depth) for depth in range(1, width))], filled) if rows else None


def about(section: Figures) -> tuple[list[str], list[list[str]]]:
    """Where weights or precision are not the same, a reader must see it."""
    rows = []
    for row in section["methods"]:
        facts = row["facts"]
        size = f"{facts['weight_bytes'] / 1e6:.0f} MB" if facts.get("weight_bytes") else "-"
        rows.append([
            row["method"], row["runtime"], str(facts.get("version", "-")), str(facts.get("dtype", "-")),
            str(facts.get("weights", "-")), size, str(facts.get("note", "")),
        ])  # fmt: skip
    return ["system", "runtime", "version", "dtype", "weights", "read a step", "note"], rows


def section_notes(section: Figures) -> list[str]:
    """What did not run comes first."""
    failed: dict[tuple[str, str], int] = {}
    for failure in section["failures"]:
        what = "failed" if failure["fault"] else "left out"
        place = (f"{failure['label']} {what}", failure["error"][:300])
        failed[place] = failed.get(place, 0) + 1
    lines = [f"{who}: {error}" for who, error in failed]
    for row in section["methods"]:
        if row["beyond_ties"]:
            lines.append(
                f"{row['method']}: of its different answers {row['near_ties']} begin at a near tie and "
                f"{row['beyond_ties']} do not"
            )
    return lines + list(notes(section))


def groups(section: Figures) -> list[str]:
    return list(section["methods"][0]["groups"])


def _pace(f: Figures) -> str:
    return f"{f['tokens_per_s']:.1f}" + (f" ({f['speedup']:.2f}x)" if f["speedup"] is not None else "")


def _with_span(f: Figures) -> str:
    if f["speedup"] is None:
        return "-"
    return f"{f['speedup']:.2f}x" + (f" ({span(f['speedup_interval'])})" if f["speedup_interval"] else "")


def _rates(result: Figures) -> str:
    rate = f"bandwidth {result['bandwidth'] / 1e9:.1f} GB/s" if result["bandwidth"] else "bandwidth not measured"
    sessions = f" · measured in {result['sessions']} sessions" if result["sessions"] > 1 else ""
    return f"{rate}{sessions} · drafter memory: {result['identity']['memory']}{' between prompts' * _resets(result)}"


def _resets(result: Figures) -> bool:
    return bool(result["identity"]["memory"] == "reset")


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headers) + " |"
    yield "|" + "---|" * len(headers)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
