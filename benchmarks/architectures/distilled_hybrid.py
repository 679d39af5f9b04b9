"""A distilled hybrid decoded plainly, by `mix`, and with a draft model: trees (`stree`) against chains of as many rows.

outrider train data --out text --tokens 2M && outrider train hybrid --data text --out hybrid
python benchmarks/architectures/distilled_hybrid.py --model hybrid --draft smollm2 [--limit N] [--json [FILE]]
"""

from __future__ import annotations

from benchmarks.common import arguments, give, loaded, measure, run
from outrider.bench.contenders import method_contender, parse_specs

ROWS = 12


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--draft", default="smollm2", help="a model with the same vocabulary")
    args = parser.parse_args()
    names = "mix,chain=draft-model,short=draft-model,tree=stree,deep=stree"
    options = {
        "chain.budget": str(ROWS), "short.budget": "4", "tree.budget": str(ROWS), "deep.budget": str(ROWS),
        "deep.depth": "8", **{f"{name}.draft": args.draft for name in ("chain", "short", "tree", "deep")},
        **{f"{name}.controller": "fixed" for name in ("chain", "short", "tree", "deep")},
    }  # fmt: skip
    with loaded(args) as (engine, prompts):
        specs = parse_specs(names, options)
        out = measure(args, engine, prompts, [method_contender(engine, spec) for spec in specs])
    figures = {m["method"]: m for m in out["methods"]}
    lines = [
        f"{name}: {m['speedup']:.3f}x plain, {m['mean_accepted']:.3f} tokens a step" for name, m in figures.items()
    ]
    give(args, out, lines, out)


if __name__ == "__main__":
    run(main)
