"""Best of N: the accepted length of STAND by how many samples of the same prompt were finished before.

N samples of one prompt are drawn one after another; those that share their table learn from the ones before, those with
a private one cannot and stand beside them as the control. Prompts never help one another.
Run: python benchmarks/methods/best_of_n.py [--prompts FILE --limit 1] [--temperature 0.8]
     [--json [FILE]] [--plot FILE.svg]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, give, loaded, run
from outrider.api import Outrider
from outrider.core.params import SamplingParams
from outrider.store.prompts import Prompt

SCOPES = {"shared by the samples": "prompt", "private to each": "private"}


def curve(
    engine: Outrider, prompts: Sequence[Prompt], scope: str, samples: int, budget: int, params: dict[str, Any]
) -> list[dict[str, float]]:
    """Per number of finished samples: tokens emitted a step over all prompts, and its spread between prompts."""
    recipe = engine.recipe("stand", {"scope": scope, "budget": budget, "controller": "fixed"})
    stats = []
    for prompt in prompts:
        ids = engine.encode_chat(prompt.conversation())
        handles = (engine.engine.submit(ids, SamplingParams(seed=i, **params), recipe) for i in range(samples))
        stats.append([handle.result().stats for handle in handles])
    points = []
    for finished in range(samples):
        finished_stats = [row[finished] for row in stats]
        each = [s.new_tokens / s.steps for s in finished_stats]
        points.append(
            {
                "finished": finished,
                "accepted_length": sum(s.new_tokens for s in finished_stats) / sum(s.steps for s in finished_stats),
                "standard_error": statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0,
                "nodes_per_step": sum(s.drafted for s in finished_stats) / sum(s.steps for s in finished_stats),
            }
        )
    return points


def plot(path: Path, curves: dict[str, list[dict[str, float]]], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        x, y = [p["finished"] for p in points], [p["accepted_length"] for p in points]
        axes.errorbar(x, y, yerr=[p["standard_error"] for p in points], marker="o", capsize=3, label=label)
    axes.set(xlabel="samples finished before", ylabel="accepted length (tokens a step)", title=title, ylim=(1, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the curves as a picture")
    args = parser.parse_args()
    params = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    with loaded(args) as (engine, prompts):
        curves = {
            label: curve(engine, prompts, scope, args.samples, args.budget, params) for label, scope in SCOPES.items()
        }
    settings = {"model": args.model, "prompts": len(prompts), "budget": args.budget, "samples": args.samples, **params}
    if args.plot:
        plot(args.plot, curves, f"STAND, {len(prompts)} prompts, temperature {args.temperature}")
    lines = [f"{'finished before':<26}" + "".join(f"{p['finished']:>7}" for p in next(iter(curves.values())))]
    lines += [
        f"{label:<26}" + "".join(f"{p['accepted_length']:>7.2f}" for p in points) for label, points in curves.items()
    ]
    give(args, {"settings": settings, "curves": curves}, lines)


if __name__ == "__main__":
    run(main)
