"""Pictures as SVG data that a page can carry: `draw` for any, `plots` for those of a comparison, others for a bench.

Needs matplotlib (extra [bench]).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from outrider.core.errors import MissingExtra

Result = Mapping[str, Any]
COLOURS = ("#8c8c8c", "#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#987000", "#337ea9")
PARTS = {"draft_share": "draft", "verify_share": "verify", "rest_share": "rest"}


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise MissingExtra("plots need the package matplotlib; run: pip install 'outrider[bench]'")


def plots(result: Result) -> list[tuple[str, str]]:
    """(title, data URI) of each picture that has something to show."""
    check_matplotlib()
    if not result["units"]:
        return []
    pictures: list[tuple[str, Callable[[Result, Any], None]]] = [
        ("Speed-up by group, with its 95% interval; plain decoding is 1", _speedups),
        ("Speed-up prompt by prompt", _prompts),
        ("Acceptance by depth: share accepted where the depth above was", _acceptance),
        ("Where the time of a step goes", _shares),
    ]
    return [(title, draw(result, paint)) for title, paint in pictures]


def section_plots(result: Result) -> list[tuple[str, str]]:
    """Of one section of a bench."""
    check_matplotlib()
    if not result["units"]:
        return []
    pictures: list[tuple[str, Callable[[Result, Any], None]]] = [
        ("Speed-up over plain decoding of the same runtime by group, with its 95% interval", _speedups),
        ("Tokens a second by group", _rates),
        ("Accepted length against speed-up; on the line every accepted token is paid in time", _accepted),
        ("Acceptance by depth: share accepted where the depth above was", _acceptance),
        ("Where the time of a step goes", _shares),
    ]
    return [(title, draw(result, paint)) for title, paint in pictures]


def bench_plots(result: Result) -> list[tuple[str, str]]:
    """What changes from section to section: batch size and context."""
    check_matplotlib()
    greedy = [s for s in result["sections"] if s["units"] and s["settings"]["temperature"] == 0]
    greedy = greedy or [s for s in result["sections"] if s["units"]]
    out = []
    if len({s["settings"]["batch"] for s in greedy}) > 1:
        out.append(("Tokens a second against batch size", draw({"sections": greedy}, _batches)))
    long = [s for s in greedy if s["suite"] == "long" and s["settings"]["batch"] == 1]
    if long:
        out.append(("Tokens a second against the length of the prompt", draw(long[0], _contexts)))
    return out


def step_costs(result: Result, axes: Any) -> None:
    """Milliseconds a step against rows, one line a batch size and context."""
    lines: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for step in result["steps"]:
        lines.setdefault((step["batch"], step["context"]), []).append(step)
    for i, ((batch, context), steps) in enumerate(lines.items()):
        rows = [step["rows"] for step in steps]
        axes.plot(
            rows, [1e3 * step["seconds"] for step in steps], marker="o", markersize=3, color=colour(i + 1),
            label=f"batch {batch}, context {context}",
        )  # fmt: skip
        if steps[0]["floor_seconds"] is not None:
            axes.plot(rows, [1e3 * step["floor_seconds"] for step in steps], linestyle="--", color=colour(i + 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows a sequence (tree size + 1)")
    axes.set_ylabel("ms a step")
    legend(axes)


def draw(result: Result, paint: Callable[[Result, Any], None]) -> str:
    """A data URI of what `paint` does with the result on one pair of axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    with rc_context({"svg.hashsalt": "outrider", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        paint(result, axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _speedups(result: Result, axes: Any) -> None:
    groups = list(result["methods"][0]["groups"])
    names = ["all", *groups] if len(groups) > 1 else ["all"]
    width = 0.8 / len(result["methods"])
    for i, method in enumerate(result["methods"]):
        figures = [method, *(method["groups"][g] for g in names[1:])]
        heights = [f["speedup"] or 0.0 for f in figures]
        ends = [f["speedup_interval"] or (h, h) for f, h in zip(figures, heights, strict=True)]
        below = [max(h - low, 0.0) for h, (low, _) in zip(heights, ends, strict=True)]
        above = [max(high - h, 0.0) for h, (_, high) in zip(heights, ends, strict=True)]
        places = [x + (i - (len(result["methods"]) - 1) / 2) * width for x in range(len(names))]
        axes.bar(places, heights, width * 0.95, label=method["method"], color=colour(i), yerr=[below, above], capsize=2)
    axes.axhline(1.0, color="#444", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("speed-up")
    legend(axes)


def _rates(result: Result, axes: Any) -> None:
    groups = list(result["methods"][0]["groups"])
    width = 0.8 / len(result["methods"])
    for i, method in enumerate(result["methods"]):
        heights = [method["groups"][g]["tokens_per_s"] or 0.0 for g in groups]
        places = [x + (i - (len(result["methods"]) - 1) / 2) * width for x in range(len(groups))]
        axes.bar(places, heights, width * 0.95, label=method["method"], color=colour(i))
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("tokens / s")
    legend(axes)


def _accepted(result: Result, axes: Any) -> None:
    most = 1.0
    for i, method in enumerate(result["methods"]):
        if method["mean_accepted"] and method["speedup"]:
            most = max(most, method["mean_accepted"], method["speedup"])
            axes.plot(method["mean_accepted"], method["speedup"], "o", color=colour(i), label=method["method"])
    axes.plot([1, most], [1, most], color="#444", linewidth=0.8, linestyle="--")
    axes.set_xlabel("accepted length")
    axes.set_ylabel("speed-up")
    legend(axes)


def _batches(result: Result, axes: Any) -> None:
    """Of the first suite; all systems."""
    suite = result["sections"][0]["suite"]
    sections = [s for s in result["sections"] if s["suite"] == suite]
    labels = list(dict.fromkeys(m["method"] for s in sections for m in s["methods"]))
    for i, label in enumerate(labels):
        points = [
            (s["settings"]["batch"], m["tokens_per_s"])
            for s in sections
            for m in s["methods"]
            if m["method"] == label and m["tokens_per_s"]
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, color=colour(i), label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens / s")
    legend(axes)


def _contexts(result: Result, axes: Any) -> None:
    for i, method in enumerate(result["methods"]):
        points = [(g["prompt_tokens"], g["tokens_per_s"]) for g in method["groups"].values() if g["tokens_per_s"]]
        if points:
            line = sorted(points)
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, color=colour(i), label=method["method"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("tokens / s")
    legend(axes)


def _prompts(result: Result, axes: Any) -> None:
    for i, method in enumerate(result["methods"]):
        if method["method"] == result["baseline"]:
            continue
        ratios = sorted(
            filter(None, (_unit_speedup(unit, method["method"], result["baseline"]) for unit in result["units"]))
        )
        axes.plot(range(1, len(ratios) + 1), ratios, marker=".", label=method["method"], color=colour(i))
    axes.axhline(1.0, color="#444", linewidth=0.8, linestyle="--")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("answers, slowest to fastest")
    axes.set_ylabel("speed-up")
    legend(axes)


def _unit_speedup(unit: Mapping[str, Any], label: str, baseline: str) -> float | None:
    rates = {r["method"]: r["decoded"] / r["decode_s"] for r in unit["runs"] if r["decode_s"] and r["decoded"]}
    return rates[label] / rates[baseline] if label in rates and baseline in rates else None


def _acceptance(result: Result, axes: Any) -> None:
    for i, method in enumerate(result["methods"]):
        if rates := method["acceptance_by_depth"]:
            axes.plot(
                range(1, len(rates) + 1), rates, marker="o", markersize=3, label=method["method"], color=colour(i)
            )
    axes.set_ylim(0, 1.02)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("depth")
    axes.set_ylabel("acceptance")
    legend(axes)


def _shares(result: Result, axes: Any) -> None:
    names = [method["method"] for method in result["methods"]]
    left = [0.0] * len(names)
    for (key, part), colour in zip(PARTS.items(), COLOURS[1:], strict=False):
        widths = [method[key] or 0.0 for method in result["methods"]]
        axes.barh(names, widths, left=left, label=part, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of decode time")
    legend(axes)


def legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
