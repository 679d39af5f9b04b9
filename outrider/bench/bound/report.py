"""What people read of a bound: tables for the terminal and one HTML page, both made from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape as plain
from rich.text import Text

from outrider.bench.report import html_table, on_machine, page, paragraphs, pictures, ran_in, rich_table

Figures = Mapping[str, Any]
SHAPES = ("shape", "drawn", "nodes", "rule", "tokens a step", "over the token-level rule")
SCHEMES = {
    "iid": "k independent drafts",
    "without-replacement": "k drafts without replacement",
    "top-plus-one": "the k - 1 likeliest and one drawn from the rest",
    "fixed": "the k likeliest, nothing drawn",
}
LEGEND = (
    "acceptance: chance, in percent, that the token said is one of the k drafts · optimum: the most that any exact "
    "rule can reach with drafts made that way · ±: standard error over texts, in a row of several the largest · ~: a "
    "mean over sampled refusals, their error included · tokens a step: expected on trees that the drafter drew, the "
    "target's own token included, exact given the tree · *: no rule does better on this shape"
)


def terminal(result: Figures) -> RenderableType:
    """A table a drawing scheme, one of the shapes, and the verdict."""
    parts: list[RenderableType] = [Text(line, style="dim") for line in headlines(result)]
    for scheme in result["schemes"]:
        table = rich_table(columns(result), range(1, 2 + len(result["drafts"])), title(scheme))
        for cells in scheme_rows(scheme):
            table.add_row(*map(plain, cells), style="bold" if cells[0] == "optimum" else None)
        parts.append(table)
    if result["shapes"]:
        table = rich_table(SHAPES, range(2, 3), "Tokens a step on whole trees")
        for shape in result["shapes"]:
            for cells in shape_rows(shape):
                table.add_row(*map(plain, cells))
            table.add_section()
        parts.append(table)
    parts.append(Text(LEGEND, style="dim"))
    parts += [Text(note, style="yellow") for note in notes(result)]
    if result["verdict"]:
        parts.append(Text(result["verdict"]["text"], style="bold"))
    return Group(*parts)


def html(result: Figures) -> str:
    """The page. Needs matplotlib."""
    from outrider.bench.plots import draw

    drawn = [(title(scheme), draw(scheme, partial(_acceptance, result["drafts"]))) for scheme in result["schemes"]]
    if result["shapes"]:
        drawn.append(("Tokens a step on whole trees, with their standard errors", draw(result, _tokens)))
    body = [
        f'<div class="facts">{paragraphs(headlines(result))}</div>',
        paragraphs(notes(result), "note"),
        paragraphs([result["verdict"]["text"]] if result["verdict"] else []),
        pictures(drawn),
    ]
    for scheme in result["schemes"]:
        body += [f"<h2>{escape(title(scheme))}</h2>", html_table(columns(result), scheme_rows(scheme))]
    if result["shapes"]:
        rows = [cells for shape in result["shapes"] for cells in shape_rows(shape)]
        body += ["<h2>Tokens a step on whole trees</h2>", html_table(SHAPES, rows)]
    return page("what a better rule or drafter is worth", [*body, paragraphs([LEGEND], "legend")], result)


def headlines(result: Figures) -> list[str]:
    s = result["settings"]
    cuts = "".join(f", {name} {s[name]}" for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)) if s[name] != off)
    return [
        f"{ran_in(s)}, draft: {s['draft']}, rows of {s['width']} · "
        f"{result['positions']} positions in {result['texts']} texts ({s['prompts']}{', raw' if s['raw'] else ''}) · "
        f"temperature {s['temperature']}{cuts}, seed {s['seed']}",
        on_machine(result["machine"]),
    ]


def notes(result: Figures) -> list[str]:
    """What a reader must know before believing the figures."""
    out = []
    if not result["complete"]:
        out.append(f"interrupted: figures are of the {result['positions']} positions looked at by then")
    if not result["positions"]:
        out.append("no position was looked at: let the texts be longer or give more prompts")
    elif result["texts"] == 1:
        out.append("one text only: its errors hold for this text, not for others; give more prompts")
    return out


def columns(result: Figures) -> list[str]:
    return ["rule", *(f"k={k}" for k in result["drafts"]), "±"]


def title(scheme: Figures) -> str:
    return f"Acceptance of {SCHEMES[scheme['scheme']]}"


def scheme_rows(scheme: Figures) -> list[list[str]]:
    rows = [["optimum", *shares(scheme["optimum"])]]
    for rule in scheme["rules"]:
        rows.append([rule["rule"] + " ~" * (not rule["exact"]), *shares(rule["acceptance"])])
        rows.append(["  to optimum", *shares(rule["gap"])])
    return rows


def shape_rows(shape: Figures) -> list[list[str]]:
    rows = []
    for i, rule in enumerate(shape["rules"]):
        name = rule["rule"] + " *" * (rule["rule"] == shape["optimum"])
        first = ("", "", "") if i else (shape["shape"], shape["drawing"], f"{shape['nodes']:.0f}")
        gain = "token-level" if rule["rule"] == shape["baseline"] else amount(rule["gain"], "+")
        rows.append([*first, name, amount(rule["tokens_per_step"]), gain])
    return rows


def shares(figures: Sequence[Figures]) -> list[str]:
    """Percent, and the largest of their errors."""
    errors = [f["error"] for f in figures if f["error"] is not None]
    return [*(f"{round(100 * f['mean'], 1) + 0.0:.1f}" for f in figures), f"{100 * max(errors):.1f}" if errors else "-"]


def amount(figure: Figures, sign: str = "") -> str:
    error = "" if figure["error"] is None else f" ± {figure['error']:.3f}"
    return f"{figure['mean']:{sign}.3f}{error}"


def _acceptance(drafts: Sequence[int], scheme: Figures, axes: Any) -> None:
    from outrider.bench.plots import colour, legend

    lines = [("optimum", scheme["optimum"], "#222"), *(
        (rule["rule"], rule["acceptance"], colour(i)) for i, rule in enumerate(scheme["rules"], 1)
    )]  # fmt: skip
    for name, figures, shade in lines:
        means, errors = [f["mean"] for f in figures], [f["error"] or 0.0 for f in figures]
        axes.errorbar(drafts, means, errors, marker="o", markersize=3, capsize=2, label=name, color=shade)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("drafts")
    axes.set_ylabel("acceptance")
    legend(axes)


def _tokens(result: Figures, axes: Any) -> None:
    from outrider.bench.plots import colour, legend

    names = list(dict.fromkeys(rule["rule"] for shape in result["shapes"] for rule in shape["rules"]))
    labelled: set[str] = set()
    for x, shape in enumerate(result["shapes"]):
        width = 0.8 / len(shape["rules"])
        for i, rule in enumerate(shape["rules"]):
            name, figure = rule["rule"], rule["tokens_per_step"]
            axes.bar(
                x + (i - (len(shape["rules"]) - 1) / 2) * width, figure["mean"], width * 0.95,
                color=colour(names.index(name)), label=None if name in labelled else name,
                yerr=figure["error"] or 0.0, capsize=2,
            )  # fmt: skip
            labelled.add(name)
    axes.axhline(1.0, color="#444", linewidth=0.8, linestyle="--")
    ticks = [f"{shape['shape']}\n{shape['drawing']}" for shape in result["shapes"]]
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
    axes.set_ylabel("tokens a step")
    legend(axes)
