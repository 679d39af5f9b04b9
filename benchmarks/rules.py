"""Accepted length of every acceptance rule and every tree shape at equal numbers of candidates, with one draft model.

Nothing is timed, so prompts run as one batch. Intervals are bootstrap over prompts.
Run: python benchmarks/rules.py --prompts FILE.jsonl --limit 10 [--device cuda] [--budgets 8,16] [--json [FILE]]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from common import arguments, give, run

import outrider
from outrider.bench.compare import per_group
from outrider.bench.machine import machine
from outrider.params import SamplingParams
from outrider.prompts import built_in_prompts, read_prompts

SHAPES = {4: "2,1", 8: "2,1,1,1", 16: "4,1,1,1", 32: "8,1,1,1"}
BEAMS = {4: 2, 8: 2, 16: 4, 32: 8}


def contenders(budget: int) -> dict[str, tuple[str, dict[str, Any]]]:
    shape = {"expansion": SHAPES[budget], "depth": 4}
    out: dict[str, tuple[str, dict[str, Any]]] = {
        "invariant, top-k tree": ("specinfer", {**shape, "verifier": "invariant"}),
        "naive, iid": ("specinfer", {**shape, "verifier": "naive"}),
        "recursive, iid (specinfer)": ("specinfer", shape),
        "k-SEQ, iid (spectr)": ("spectr", shape),
        "traversal, iid": ("specinfer", {**shape, "verifier": "traversal"}),
        "recursive, without replacement (rsd-c)": ("rsd-c", shape),
        "traversal, without replacement": ("traversal", shape),
        "optimal, top plus one (mdsd-optimal)": ("mdsd-optimal", shape),
        "rsd-s": ("rsd-s", {"beam": BEAMS[budget], "depth": 4}),
        "sequoia": ("sequoia", {"depth": 6}),
        "dyspec, threshold": ("dyspec", {"depth": 6}),
        "dyspec, heap": ("dyspec", {"depth": 6, "form": "heap"}),
    }
    if budget <= 8:
        out["rejection, chain (draft-model)"] = ("draft-model", {})
        out["block, chain (block-verify)"] = ("block-verify", {})
    return out


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=64)
    parser.add_argument("--budgets", default="8,16", help="candidates a step, of 4, 8, 16, 32")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    chosen = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    rows: list[dict[str, Any]] = []
    limits = {"max_slots": 64, "max_context": 2304, "cache_bytes": 16 << 30}  # room for all prompts at once
    with outrider.load(args.model, method="plain", device=args.device, dtype=args.dtype, **limits) as engine:
        prompts = [engine.encode_chat(p.conversation([])) for p in chosen]
        for budget in map(int, args.budgets.split(",")):
            for label, (method, options) in contenders(budget).items():
                recipe = engine.recipe(method, {"budget": budget, "controller": "fixed", **options})
                runs = []
                for seed in range(1, args.rounds + 1):
                    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=seed)
                    handles = [engine.engine.submit(ids, params, recipe) for ids in prompts]
                    runs += [handle.result().stats for handle in handles]
                counts = np.array([(s.new_tokens, s.steps, s.drafted) for s in runs], dtype=float)
                rows.append({"rule": label, "budget": budget, **accepted(counts)})
                print(line(rows[-1]), file=sys.stderr)
    settings = {"prompts": len(chosen), "max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    give(args, {"rows": rows, "settings": settings, "machine": machine()}, [line(row) for row in rows])


def accepted(counts: np.ndarray) -> dict[str, Any]:
    """Tokens a step over all prompts, and the middle 95% of 1000 resamplings of prompts."""
    again = np.random.default_rng(0).integers(0, len(counts), (1000, len(counts)))
    sums = counts[again].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    tokens, steps, drafted = counts.sum(0)
    return {"accepted": tokens / steps, "interval": [float(low), float(high)], "candidates": drafted / steps}


def line(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"{row['rule']:<42}{row['budget']:>4}  {row['accepted']:.3f}  [{low:.3f}, {high:.3f}]  {row['candidates']:.1f}"
    )


if __name__ == "__main__":
    run(main)
