"""Speed-up at the cost of a large model with the acceptance of a real one: a small model, widened in memory.

`outrider bench inflate` writes such a model; here it is made on the device and thrown away. Plain decoding and the
methods run in the same runtime on the first turns of the prompts, each warmed up before, in interleaved rounds of which
the median counts; every figure stands beside its accepted length and what a step was spent on. The EAGLE-3 drafter of
the small model is widened as the model is (`inflated`: it costs what the drafter of such a model costs), or stays as it
is (`own`). Shape `own` measures the small model itself.
Run: python benchmarks/inflated.py --device cuda --dtype bfloat16 --prompts FILE.jsonl [--group chat] [--limit N]
     [--methods plain,mix,eagle3] [--drafter own|inflated] [--set eagle3.budget=63] [--temperature 0,1] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, run

import outrider
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.bench.contenders import BASELINE, EngineRunner, Spec, parse_specs
from outrider.bench.inflate import difference, inflate, inflate_drafter, parse_shape
from outrider.cli.options import parse_options
from outrider.core.generation import Stats
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel, load_model
from outrider.models.drafts import load_draft, shipped_draft
from outrider.models.trained import load_eagle3
from outrider.store.prompts import built_in_prompts, read_prompts

EMBEDDED_SIZE = "own"
WARM_UP = 3  # prompts: enough that everything that is recorded, compiled or tried now and then has been once


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument(
        "--shape", default="8b", help=f"a name, sizes such as hidden=1024, or {EMBEDDED_SIZE}: not widened"
    )
    parser.add_argument("--methods", default="mix")
    parser.add_argument("--set", action="append", default=[], metavar="LABEL.OPTION=VALUE")
    parser.add_argument("--group", help="only this group of prompts")
    parser.add_argument(
        "--drafter", choices=["own", "inflated"], default="inflated", help="size of the EAGLE-3 drafter"
    )
    parser.add_argument("--drafter-folder", metavar="FOLDER", help="the small model's; the shipped one without it")
    parser.add_argument("--draft", metavar="FOLDER", help="a draft trained for the small model, as the large one's own")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--temperature", default="0", help="one or several, such as 0,1")
    args = parser.parse_args()
    specs = parse_specs(args.methods, parse_options(args.set))
    began = time.perf_counter()
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    shape = None if args.shape == EMBEDDED_SIZE else parse_shape(args.shape, loaded.model.config)
    model = loaded.model if shape is None else inflate(loaded.model, shape)
    worst, agree = difference(loaded.model, model)
    _say(began, f"{model.num_parameters() / 1e9:.2f}B parameters; logits differ by {worst:.1e} of the largest, "
                f"{100 * agree:.0f}% of rows choose the same token")  # fmt: skip
    prompts = read_prompts(args.prompts) if args.prompts else built_in_prompts()
    prompts = per_group([p for p in prompts if args.group in (None, p.group)], args.limit)
    out: dict[str, Any] = {"shape": args.shape, "difference": worst, "same_token": agree, "methods": []}
    with outrider.load(
        model, method="plain", tokenizer=loaded.tokenizer, runtime=args.runtime, max_slots=1,
        max_context=args.max_context,
    ) as engine:  # fmt: skip
        _say(began, f"runtime {engine.target.traits.runtime} is ready")
        if args.draft:
            engine.use_drafter(load_draft(args.draft, loaded))
        if (net := _drafter(args, loaded)) is not None:
            widen = shape is not None and args.drafter == "inflated"
            net = inflate_drafter(net, replace(shape, layers=1)) if widen and shape is not None else net
            engine.use_drafter(net, "eagle3")
            out["drafter"] = {"size": args.drafter, "parameters": sum(p.numel() for p in net.parameters())}
        texts = [engine.encode_chat(prompt.conversation(())) for prompt in prompts]
        for temperature in map(float, args.temperature.split(",")):
            params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=1)
            runners = [_ready(engine, spec, texts, params) for spec in specs]
            _say(began, f"temperature {temperature:g}: all methods are warm")
            rounds: dict[str, list[dict[str, Any]]] = {spec.label: [] for spec in specs}
            for number in range(args.rounds):
                for spec, runner in zip(specs, runners, strict=True):
                    runner.forget()  # the same prompts again are no news to a drafter that remembers them
                    rounds[spec.label].append(_measured(spec, runner, texts, params))
                    _say(began, f"round {number + 1}  {_line(rounds[spec.label][-1], rounds[specs[0].label][-1])}")
                    if args.json not in (None, "-"):  # early and often: a run that is cut short leaves what it has
                        Path(args.json).write_text(json.dumps(out | {"now": rounds}, indent=2) + "\n", encoding="utf-8")
            out["methods"] += [_median(made, rounds[specs[0].label]) | {"temperature": temperature}
                               for made in rounds.values()]  # fmt: skip
            for one in out["methods"][-len(specs) :]:
                _say(began, f"median   {one['label']:<12} {one['tokens_per_s']:7.1f} tok/s {one['over_first']:5.2f}x")
        if args.json not in (None, "-"):
            Path(args.json).write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")
    if args.json == "-":
        print(json.dumps(out, indent=2))


def _drafter(args: Any, loaded: LoadedModel) -> Any:
    folder = Path(args.drafter_folder) if args.drafter_folder else shipped_draft(loaded, "eagle3")
    return None if folder is None else load_eagle3(folder, loaded)


def _ready(engine: Outrider, spec: Spec, texts: Sequence[list[int]], params: SamplingParams) -> EngineRunner:
    """A method that has run: what it records and compiles is there, what it learnt of the prompts is forgotten."""
    runner = EngineRunner(engine, engine.recipe(spec.method, spec.options))
    for text in texts[:WARM_UP]:
        runner([text], params)
    runner.forget()
    return runner


def _measured(
    spec: Spec, runner: EngineRunner, texts: Sequence[list[int]], params: SamplingParams
) -> dict[str, Any]:  # fmt: skip
    """All prompts after one another; what drafters learn stays from one to the next."""
    total = Stats(method=spec.label)
    outputs = []
    for text in texts:
        done = runner([text], params)
        total.add(done.stats)
        outputs.append(list(done.outputs[0]))
    per_step = {name: 1e3 * getattr(total, f"{name}_s") / total.steps for name in ("draft", "verify", "rest")}
    return {
        "label": spec.label, "method": spec.method, "options": spec.options, "tokens_per_s": total.tokens_per_s,
        "mean_accepted": total.mean_accepted, "candidates": total.drafted / total.steps, "steps": total.steps,
        "ms_per_step": per_step, "acceptance_by_depth": total.acceptance_by_depth,
        "drafter_failures": total.drafter_failures, "outputs": outputs,
    }  # fmt: skip


def _median(rounds: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round in the middle by speed, and the middle of the ratios to the first method's same round."""
    ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(rounds, first, strict=True)]
    middle = sorted(rounds, key=lambda one: one["tokens_per_s"])[len(rounds) // 2]
    return middle | {"over_first": median(ratios), "all_over_first": ratios}


def _line(one: dict[str, Any], plain: dict[str, Any]) -> str:
    step = one["ms_per_step"]
    told = (
        f"{one['label']:<12} {one['tokens_per_s']:7.1f} tok/s {one['tokens_per_s'] / plain['tokens_per_s']:5.2f}x   "
        f"accepted length {one['mean_accepted']:.2f} of {one['candidates']:4.1f} candidates   a step of "
        f"{sum(step.values()):5.2f} ms: draft {step['draft']:.2f}, verify {step['verify']:.2f}, host {step['rest']:.2f}"
    )
    if one["label"] == BASELINE:
        return told
    same = [_common(a, b) for a, b in zip(one["outputs"], plain["outputs"], strict=True)]
    whole = sum(count is None for count in same)
    return f"{told}   {whole} of {len(same)} texts as plain"


def _common(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two texts part; None: nowhere."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def _say(began: float, text: str) -> None:
    print(f"[{time.perf_counter() - began:5.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
