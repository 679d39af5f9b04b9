"""The cost-aware tree against the best fixed tree: chosen on one half of the prompts, compared on the other.

Fixed trees are Sequoia's at several sizes, all with the same draft. Ratios of decode time are paired by prompt, with
bootstrap intervals, overall and per group.
Run: python benchmarks/methods/cost_aware.py --prompts FILE.jsonl [--limit N] [--temperature T] [--json [FILE]]
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import arguments, compared, give, loaded, run
from outrider.bench.contenders import method_contender, parse_specs
from outrider.bench.figures import figures, interval, paired, pooled_ratio, result

SIZES = (2, 4, 8, 16)
MINE = "cost-aware-tree"


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    fixed = [f"fixed-{size}" for size in SIZES]
    options: dict[str, Any] = {f"fixed-{size}.budget": size for size in SIZES}
    options |= {f"{label}.controller": "fixed" for label in fixed}
    names = ",".join(["plain", MINE, *(f"{label}=sequoia" for label in fixed)])
    with loaded(args) as (engine, prompts):
        contenders = [method_contender(engine, spec) for spec in parse_specs(names, options)]
        comparison = compared(args, engine, prompts, contenders, args.temperature)
    halves = [[u for u in comparison.units if u.case % 2 == half] for half in (0, 1)]
    speed = {label: figures(halves[0], label, "plain")["tokens_per_s"] for label in fixed}
    best = max(speed, key=lambda label: speed[label] or 0.0)
    table: dict[str, dict[str, Any]] = {}
    for group in ("all", *dict.fromkeys(u.group for u in halves[1])):
        units = [u for u in halves[1] if group in ("all", u.group)]
        sums = paired(units, MINE, best)
        table[group] = {
            "ratio": float(pooled_ratio(sums)),
            "interval": interval(pooled_ratio, sums),
            "cases": len(sums),
        }
    lines = [f"best fixed tree on the first half: {best} ({speed[best]:.1f} tokens/s)"]
    for group, row in table.items():
        low, high = row["interval"] or (float("nan"), float("nan"))
        lines.append(f"{MINE} / {best}, {group}: {row['ratio']:.3f}x  [{low:.3f}, {high:.3f}]  {row['cases']} prompts")
    out = result(comparison)
    give(args, {"best": best, "speed": speed, "ratios": table, **out}, lines, out)


if __name__ == "__main__":
    run(main)
