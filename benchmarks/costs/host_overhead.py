"""Host time a step outside the target's forward, at batch 1 with 16 candidates: drafting, judging, bookkeeping.

Prompt lookup drafts on the host, so its drafting counts. `accept-none` offers all 16 candidates at every step.
Run: python benchmarks/costs/host_overhead.py [--json [FILE]]
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import arguments, give, loaded, measure, run
from outrider.bench.contenders import method_contender, parse_specs

NODES = 16
OPTIONS = {
    f"{m}.{k}": v for m in ("prompt-lookup", "accept-none") for k, v in (("budget", NODES), ("controller", "fixed"))
}


def per_step(out: dict[str, Any], label: str) -> dict[str, float]:
    """Milliseconds: the median over answers of each one's mean."""
    runs = [run for unit in out["units"] for run in unit["runs"] if run["method"] == label]
    draft = statistics.median(1e3 * r["draft_s"] / r["steps"] for r in runs)
    rest = statistics.median(1e3 * (r["decode_s"] - r["draft_s"] - r["verify_s"]) / r["steps"] for r in runs)
    figures = next(m for m in out["methods"] if m["method"] == label)
    return {"nodes": figures["nodes_per_step"], "draft_ms": draft, "rest_ms": rest, "host_ms": draft + rest}


def main() -> None:
    args = arguments(__doc__, max_new_tokens=128).parse_args()
    args.limit = args.limit or (None if args.prompts else 1)
    table: dict[str, dict[str, dict[str, float]]] = {}
    with loaded(args) as (engine, prompts):
        contenders = [method_contender(engine, s) for s in parse_specs("prompt-lookup,accept-none", OPTIONS)]
        for temperature in (0.0, 0.7):
            out = measure(args, engine, prompts, contenders, temperature)
            table[f"temperature {temperature}"] = {c.label: per_step(out, c.label) for c in contenders}
    lines = [f"{'':<18}{'method':<16}{'candidates':>11}{'draft ms':>10}{'rest ms':>9}{'host ms a step':>16}"]
    for setting, rows in table.items():
        for label, r in rows.items():
            cells = f"{r['nodes']:>11.1f}{r['draft_ms']:>10.3f}{r['rest_ms']:>9.3f}{r['host_ms']:>16.3f}"
            lines.append(f"{setting:<18}{label:<16}{cells}")
    give(args, {"nodes": NODES, "host": table, "settings": out["settings"], "machine": out["machine"]}, lines)


if __name__ == "__main__":
    run(main)
