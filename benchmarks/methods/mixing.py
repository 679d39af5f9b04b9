"""Accepted length at equal budgets: every drafter that needs no second model, and their mixture, group by group.

No times: only how many tokens a step of a fixed size is worth, with a bootstrap interval of the paired difference of
the mixture and the best single drafter of each group. Memory starts empty for each method and is kept over its prompts,
or emptied before each with --memory reset.
Run: python benchmarks/methods/mixing.py --prompts FILE.jsonl [--limit N] [--budget 32] [--temperature T]
     [--json [FILE]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import arguments, loaded, run
from outrider.api import Outrider
from outrider.core.files import write_atomic
from outrider.core.params import SamplingParams
from outrider.core.protocols import Remembers
from outrider.methods.mixed import MODEL_FREE
from outrider.store.prompts import Prompt

SINGLE = "prompt-lookup,suffix,token-recycling,stand,aded,lookahead,jacobi,omnidraft-ngram"


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=96)
    parser.add_argument("--methods", default=SINGLE, help="single drafters, by name")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--memory", choices=["keep", "reset"], default="keep")
    args = parser.parse_args()
    names = ["mix", *args.methods.split(",")]
    steps: dict[str, list[tuple[int, int]]] = {}
    with loaded(args) as (engine, prompts):
        groups = [prompt.group for prompt in prompts]
        for name in names:  # the mixture first: a run cut short still says something about it
            steps[name] = steps_of(engine, name, prompts, args)
            payload = {"settings": vars(args), "groups": groups, "steps": steps, "table": table_of(steps, groups)}
            if args.json and args.json != "-":
                write_atomic(Path(args.json), json.dumps(payload, indent=2) + "\n")
    if args.json == "-":
        print(json.dumps(payload, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(picture(payload["table"], names))


def steps_of(engine: Outrider, name: str, prompts: list[Prompt], args: Any) -> list[tuple[int, int]]:
    """Tokens and target steps of each prompt's first turn."""
    fixed = {"size": "budget", "parts": MODEL_FREE} if name == "mix" else {"controller": "fixed"}
    recipe = engine.recipe(name, {"budget": args.budget, **fixed})
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1)
    counts = []
    for prompt in track(prompts, name, console=Console(stderr=True), disable=not sys.stderr.isatty()):
        if args.memory == "reset" and isinstance(recipe.drafter, Remembers):
            recipe.drafter.forget()
        messages = prompt.messages or [{"role": "user", "content": prompt.turns[0]}]
        stats = engine.engine.submit(engine.encode(messages), params, recipe).result().stats
        counts.append((stats.new_tokens, stats.steps))
    return counts


def table_of(steps: dict[str, list[tuple[int, int]]], groups: list[str]) -> dict[str, dict[str, Any]]:
    """By group: accepted length of each method, and the mixture less the best single one with its interval."""
    out: dict[str, dict[str, Any]] = {}
    for group in [*dict.fromkeys(groups), "all"]:
        at = [i for i, kind in enumerate(groups) if group in (kind, "all")]
        counts = {name: np.array([counted[i] for i in at], dtype=float) for name, counted in steps.items()}
        lengths = {name: float(counted[:, 0].sum() / counted[:, 1].sum()) for name, counted in counts.items()}
        best = max((name for name in lengths if name != "mix"), key=lengths.__getitem__, default="mix")
        picks = np.random.default_rng(0).integers(0, len(at), (4000, len(at)))
        mix, single = (counts[name][picks].sum(1) for name in ("mix", best))
        low, high = np.quantile(mix[:, 0] / mix[:, 1] - single[:, 0] / single[:, 1], [0.025, 0.975])
        out[group] = {"accepted": lengths, "best": best, "gain": lengths["mix"] - lengths[best],
                      "interval": [float(low), float(high)], "prompts": len(at)}  # fmt: skip
    return out


def picture(table: dict[str, dict[str, Any]], names: list[str]) -> Table:
    out = Table(title="accepted length", box=None)
    for column in ("group", *names, "mix less best [95%]"):
        out.add_column(column, justify="left" if column == "group" else "right")
    for group, row in table.items():
        low, high = row["interval"]
        gain = f"{row['gain']:+.2f} [{low:+.2f}, {high:+.2f}] {row['best']}"
        out.add_row(group, *(f"{row['accepted'][name]:.2f}" for name in names), gain)
    return out


if __name__ == "__main__":
    run(main)
