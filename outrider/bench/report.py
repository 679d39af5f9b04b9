"""What people read: tables for the terminal and one HTML page, both made from the JSON of a comparison alone.

The page needs nothing but itself: plots are embedded (`plots`, extra [bench]), and the JSON lies inside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape as plain
from rich.table import Table
from rich.text import Text

Figures = Mapping[str, Any]
OVERALL = (
    "method",
    "tokens/s",
    "speed-up",
    "95%",
    "accepted",
    "efficiency",
    "host ms",
    "ttft ms",
    "time",
    "same output",
)
BY_GROUP = ("group", "method", "tokens/s", "speed-up", "95%", "accepted", "same output")
LEGEND = (
    "speed-up: decode time against plain, all prompts pooled, with its interval over prompts · accepted: tokens a "
    "target step, plain is 1 · efficiency: speed-up / accepted · host: outside the models, a step · ttft: time to "
    "first token, median · time: draft / verify / rest"
)


def terminal(result: Figures) -> RenderableType:
    """All groups together, then group by group where there are several."""
    parts: list[RenderableType] = [Text(line, style="dim") for line in headlines(result)]
    overall = rich_table(OVERALL, range(1, len(OVERALL) - 1))
    for method in result["methods"]:
        overall.add_row(*map(plain, overall_cells(method)))
    parts.append(overall)
    if len(groups(result)) > 1:
        table = rich_table(BY_GROUP, range(2, len(BY_GROUP) - 1))
        for group in groups(result):
            for i, (method, figures) in enumerate(in_group(result, group)):
                table.add_row(*map(plain, group_cells("" if i else group, method, figures)))
            table.add_section()
        parts.append(table)
    parts.append(Text(LEGEND, style="dim"))
    parts += [Text(note, style="yellow") for note in notes(result)]
    return Group(*parts)


def html(result: Figures) -> str:
    """The page. Needs matplotlib."""
    from outrider.bench.plots import plots

    by_group = [group_cells(g, m, f) for g in groups(result) for m, f in in_group(result, g)]
    body = [
        f'<div class="facts">{paragraphs(headlines(result))}</div>',
        paragraphs(notes(result), "note"),
        "<h2>All prompts</h2>",
        html_table(OVERALL, [overall_cells(m) for m in result["methods"]]),
        paragraphs([LEGEND], "legend"),
        pictures(plots(result)),
        "<h2>By group</h2>",
        html_table(BY_GROUP, by_group),
    ]
    return page("comparison of methods", body, result)


def groups(result: Figures) -> list[str]:
    return list(result["methods"][0]["groups"])


def in_group(result: Figures, group: str) -> Iterator[tuple[str, Figures]]:
    for method in result["methods"]:
        yield method["method"], method["groups"][group]


def headlines(result: Figures) -> list[str]:
    s = result["settings"]
    count = sum(s["groups"].values())
    sampling = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']}, seed {s['seed']}"
    runs = f"{s['rounds']} round{'s' * (s['rounds'] > 1)}, batch {s['batch']}"
    prompts = f"{count} prompts ({s['prompts']}{', raw' if s['raw'] else ''})"
    length = f"{s['max_new_tokens']} new tokens"
    return [
        f"{ran_in(s)} · {prompts} · {length} · {sampling} · {runs}",
        on_machine(result["machine"]),
    ]  # fmt: skip


def ran_in(s: Figures) -> str:
    return f"{s['model']} in {s['precision']} by {s['runtime']} on {s['device']}"


def on_machine(m: Figures) -> str:
    gpus = "".join(f", {gpu}" for gpu in m["gpus"])
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['torch_threads']} threads{gpus} · "
        f"outrider {m['outrider']}, torch {m['torch']}, transformers {m['transformers']}, python {m['python']}"
    )


def notes(result: Figures) -> list[str]:
    """What a reader must know before believing the figures."""
    out = []
    done = len(result["units"])
    if not result["complete"]:
        out.append(f"interrupted: figures are of the {done} answers that every method had finished")
    load, cores = result["machine"]["load"], result["machine"]["cores"]
    if load is not None and load > 0.5 * cores:
        out.append(f"the machine was busy before this began (load {load} on {cores} cores): distrust the times")
    if result["skipped"]:
        out.append(f"{len(result['skipped'])} later turns were left out: they had grown past the context")
    for method in result["methods"]:
        if method["different"]:
            gaps = [d["gap"] for d in method["first_differences"] if d["gap"] is not None]
            margin = f"; top-two gap there: largest {max(gaps):.2g}, smallest {min(gaps):.2g} nats" if gaps else ""
            out.append(f"{method['method']}: {method['different']} of {method['answers']} answers differ{margin}")
        if method["drafter_failures"]:
            out.append(f"{method['method']}: its drafter failed {method['drafter_failures']} times")
    return out


def overall_cells(f: Figures) -> list[str]:
    shares = [f["draft_share"], f["verify_share"], f["rest_share"]]
    time = "-" if None in shares else "/".join(f"{100 * share:.0f}" for share in shares) + "%"
    return [
        f["method"], number(f["tokens_per_s"], 1), times(f["speedup"]), span(f["speedup_interval"]),
        number(f["mean_accepted"]), number(f["efficiency"]), number(f["host_ms_per_step"]), number(f["ttft_ms"], 0),
        time, same(f),
    ]  # fmt: skip


def group_cells(group: str, method: str, f: Figures) -> list[str]:
    return [
        group, method, number(f["tokens_per_s"], 1), times(f["speedup"]), span(f["speedup_interval"]),
        number(f["mean_accepted"]), same(f),
    ]  # fmt: skip


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def span(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.2f}-{values[1]:.2f}"


def same(f: Figures) -> str:
    if f["identical"] is None:
        return "in distribution" if f["answers"] else "-"  # another draw from the same one
    return "yes" if f["identical"] else f"{f['different']} of {f['answers']} differ"


def rich_table(headers: Sequence[str], numbers: range, title: str | None = None) -> Table:
    """An empty table; the columns of `numbers` are flush right."""
    table = Table(pad_edge=False, title=title, title_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i in numbers else "left", no_wrap=i == 0)
    return table


def page(subject: str, body: Sequence[str], result: Figures) -> str:
    """A whole page that carries its own data."""
    data = json.dumps(result, ensure_ascii=True).replace("<", "\\u003c")
    return PAGE.format(
        title=escape(subject), heading=escape(subject[0].upper() + subject[1:]), body="\n".join(body), data=data
    )


def paragraphs(lines: Sequence[str], kind: str = "") -> str:
    return "".join(f'<p class="{kind}">{escape(line)}</p>' if kind else f"<p>{escape(line)}</p>" for line in lines)


def pictures(drawn: Sequence[tuple[str, str]]) -> str:
    """Titles and data URIs as figures."""
    return "".join(
        f'<figure><img src="{uri}" alt="{escape(title)}"><figcaption>{escape(title)}</figcaption></figure>'
        for title, uri in drawn
    )


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Outrider: {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }}
th {{ border-bottom: 2px solid #888; }}
figure {{ margin: 2rem 0; }} img {{ width: 100%; }}
figcaption, .facts, .legend {{ color: #555; font-size: 13px; }}
.facts p {{ margin: 0; }} .note {{ background: #fff4d6; padding: .4rem .8rem; }}
</style></head><body>
<h1>{heading}</h1>
{body}
<script type="application/json" id="result">{data}</script>
</body></html>
"""
