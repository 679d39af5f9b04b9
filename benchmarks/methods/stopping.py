"""When to stop drafting: a trained acceptance head against every fixed length and against a tuned confidence stop.

A small model widened in memory says what it says at the cost of a large one. Its draft model or EAGLE-3 drafter drafts
chains; all ways to end them run prompt by prompt after one another, so that seconds a token can be compared pair by
pair. The head is one that `outrider train run --kind acceptance-head --drafter DRAFTER` made for the small model, and
judges the drafter that it was trained for.
Run: python benchmarks/methods/stopping.py --device cuda --dtype bfloat16 --head FOLDER [--temperature 0,1] [--limit N]
     [--shape 8b|own] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import outrider
from benchmarks.common import arguments, run
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.bench.contenders import EngineRunner
from outrider.bench.inflate import inflate, parse_shape
from outrider.control.fixed import Fixed
from outrider.core.params import SamplingParams
from outrider.core.protocols import Grower, Recipe
from outrider.core.records import Budget
from outrider.draft.acceptance_head import HeadMarks
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.grown import Grown
from outrider.draft.model.draft_model import ModelSource
from outrider.grow.chain import Chain
from outrider.grow.confident import Confident
from outrider.grow.stopping import Doubt, Stopping
from outrider.methods.common import verifier
from outrider.models import load_model
from outrider.models.drafts import load_draft, shipped_draft
from outrider.models.networks.acceptance import AcceptanceHead
from outrider.models.trained import ACCEPTANCE, load_eagle3, load_trained
from outrider.runtime.layers.choice import layer_driver
from outrider.store.prompts import built_in_prompts, read_prompts

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
LONGEST = LENGTHS[-1]
DOUBTS, CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95), (0.2, 0.35, 0.5, 0.65, 0.8)
RESAMPLES = 2000


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=96)
    parser.add_argument("--head", required=True, metavar="FOLDER")
    parser.add_argument("--shape", default="8b", help="a name or sizes; own: not widened")
    parser.add_argument("--temperature", default="0", help="one or several, such as 0,1")
    args = parser.parse_args()
    small = load_model(args.model, device=args.device, dtype=args.dtype)
    head = load_trained(ACCEPTANCE, Path(args.head), small)
    folder = shipped_draft(small, head.shape.drafter)
    assert folder is not None, "the small model has a drafter of this kind"
    model = small.model if args.shape == "own" else inflate(small.model, parse_shape(args.shape, small.model.config))
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    out: dict[str, Any] = {"shape": args.shape, "drafter": head.shape.drafter, "prompts": len(prompts)}
    with outrider.load(model, method="plain", tokenizer=small.tokenizer, max_slots=1, max_context=2048) as engine:
        texts = [engine.encode_chat(prompt.conversation(())) for prompt in prompts]
        if head.shape.drafter == "eagle3":
            driver = layer_driver(load_eagle3(folder, small), model.get_input_embeddings())
            source_of: Callable[[], Any] = partial(Eagle3Source, driver, width=64)
        else:
            source_of = partial(ModelSource, engine._parts.runtime(load_draft(folder, small)), shows=True)
        runners = {name: EngineRunner(engine, recipe) for name, recipe in recipes(engine, source_of, head).items()}
        for temperature in map(float, args.temperature.split(",")):
            params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=1)
            for runner in runners.values():
                runner([texts[0]], params)
            _say(f"temperature {temperature:g}: all are warm")

            def keep(found: dict[str, Any], temperature: float = temperature) -> None:
                out[f"temperature {temperature:g}"] = found
                _write(args.json, out)

            keep(measured(runners, texts, params, args.rounds, keep))


def recipes(engine: Outrider, source_of: Callable[[], Any], head: AcceptanceHead) -> dict[str, Recipe]:
    def chain(make: Callable[[Any], Grower], longest: int = LONGEST) -> Recipe:
        source = source_of()
        drafter = Grown(source, make(source), sampled=True)
        return Recipe("chain", drafter, verifier("rejection"), Fixed(Budget(longest, longest)))

    made = {"plain": engine.recipe("plain")}
    made |= {f"fixed {k}": chain(lambda _: Chain(), k) for k in LENGTHS}
    made |= {f"confident {t}": chain(lambda _, t=t: Confident(t)) for t in CONFIDENCES}
    ends = frozenset(engine.loaded.eos_ids)
    made |= {f"doubt {h}": chain(lambda source, h=h: Stopping(Doubt(h), HeadMarks(source, head), ends)) for h in DOUBTS}
    return made


def measured(
    runners: dict[str, EngineRunner], texts: list[list[int]], params: SamplingParams, rounds: int,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:  # fmt: skip
    """Seconds a token of every way on every text, and what they say."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    told: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for number, text in enumerate(texts):
            for name, runner in runners.items():
                stats = runner([text], params).stats
                seconds[name].append(1.0 / stats.tokens_per_s)
                told[name].append({"accepted": stats.mean_accepted, "drafted": stats.drafted / max(stats.steps, 1)})
            found = summary(seconds, told)
            keep(found)
            _say(f"text {number + 1}: best fixed {found['best_fixed']}, best doubt {found.get('best_doubt')}")
    for name, row in found["ways"].items():
        _say(f"{name:<16} {row['tokens_per_s']:7.1f} tok/s   accepted {row['accepted']:.2f} of {row['drafted']:.1f}")
    for name, row in found["against"].items():
        _say(f"{name}: {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
    return found


def summary(seconds: dict[str, list[float]], told: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    means = {name: float(np.mean(each)) for name, each in seconds.items()}
    ways = {
        name: {"tokens_per_s": 1 / means[name], "accepted": float(np.mean([one["accepted"] for one in told[name]])),
               "drafted": float(np.mean([one["drafted"] for one in told[name]]))}
        for name in seconds
    }  # fmt: skip
    best = {
        kind: min((name for name in means if name.startswith(f"{kind} ")), key=lambda name: means[name], default=None)
        for kind in ("fixed", "confident", "doubt")
    }
    against = {}
    for kind in ("fixed", "confident"):
        if best[kind] is not None and best["doubt"] is not None:
            against[f"{best['doubt']} over {best[kind]}"] = paired(seconds[best["doubt"]], seconds[best[kind]])
    return {"ways": ways, **{f"best_{kind}": name for kind, name in best.items()}, "against": against,
            "seconds": seconds}  # fmt: skip


def paired(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """How many times as fast, with its interval of 95% over texts drawn again."""
    a, b = np.array(ours), np.array(theirs)
    rows = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    ratios = b[rows].mean(1) / a[rows].mean(1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return {"ratio": float(b.mean() / a.mean()), "low": float(low), "high": float(high)}


def _write(path: str | None, out: dict[str, Any]) -> None:
    if path == "-":
        print(json.dumps(out, indent=2))
    elif path is not None:
        Path(path).write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(f"[{time.perf_counter():8.1f}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
