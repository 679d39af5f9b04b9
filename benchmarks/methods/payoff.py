"""What the payoff controller is worth: its cost when nothing is ever accepted, its gain where copying pays.

`accept-none` under payoff against plain decoding over the whole run, the learning included; prompt lookup under payoff
against plain, group by group; both under `fixed` beside them with --fixed.
Run: python benchmarks/methods/payoff.py --prompts FILE.jsonl [--limit N] [--fixed] [--json [FILE]]
"""

from __future__ import annotations

from benchmarks.common import arguments, give, loaded, measure, run
from outrider.bench.contenders import method_contender, parse_specs

FIXED = {"none-fixed.controller": "fixed", "lookup-fixed.controller": "fixed"}


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--fixed", action="store_true", help="also without the controller")
    args = parser.parse_args()
    names = "accept-none,prompt-lookup" + (",none-fixed=accept-none,lookup-fixed=prompt-lookup" if args.fixed else "")
    specs = parse_specs(names, FIXED if args.fixed else {})
    with loaded(args) as (engine, prompts):
        out = measure(args, engine, prompts, [method_contender(engine, spec) for spec in specs])
    figures = {m["method"]: m for m in out["methods"]}
    none, lookup = figures["accept-none"], figures["prompt-lookup"]
    cost = {"decode": 1 / none["speedup"] - 1, "total": 1 / none["speedup_total"] - 1}
    groups = {group: f["speedup"] for group, f in lookup["groups"].items()}
    percent = {name: f"{100 * value:.1f}%" for name, value in cost.items()}
    lines = [
        f"accept-none under payoff costs {percent['decode']} over plain ({percent['total']} with prefill)",
        *(f"prompt-lookup under payoff, {group}: {speedup:.3f}x plain" for group, speedup in groups.items()),
    ]
    give(args, {"accept_none_cost": cost, "prompt_lookup_speedup": groups, **out}, lines, out)


if __name__ == "__main__":
    run(main)
