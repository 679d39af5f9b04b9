"""Where the host's time goes in steps of many sequences on a GPU: functions by their own time, and parts of the step.

The embedded model widened to 8B shape with its shipped drafter, as in `benchmarks/company.py`, whose setting it shares;
one run without a profiler for the times of a step, one with it for the functions.
Run: python benchmarks/costs/company_profile.py [--sequences 16] [--steps 60] [--temperature 0] [--prompts FILE.jsonl]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import Counter
from itertools import islice
from typing import Any

from benchmarks.company import endless, loaded
from outrider.core.params import SamplingParams
from outrider.core.schedule import StepReport, Terms
from outrider.store.prompts import built_in_prompts, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", default="8b", help="empty: as the model is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runtime", default="graphs")
    parser.add_argument("--precision", default="")
    parser.add_argument("--cache-gib", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--method", default="mix")
    parser.add_argument("--prompts")
    args = parser.parse_args()
    read = read_prompts(args.prompts) if args.prompts else built_in_prompts()
    with loaded(args, args.sequences) as engine:
        options = {"parts": "suffix,predicted,eagle3", "scope": "private"} if args.method == "mix" else None
        recipe = engine.recipe(args.method, options)
        begun = time.perf_counter()
        engine.prepare()
        print(f"ready after {time.perf_counter() - begun:.1f} s")
        params = SamplingParams(
            max_new_tokens=1500, ignore_eos=True, temperature=args.temperature, seed=1 if args.temperature else None
        )
        texts = [engine.encode_chat(prompt.conversation()) for prompt in read]
        for number, text in enumerate(islice(endless(texts), args.sequences)):
            engine.engine.submit(text, params, recipe, terms=Terms(cache_salt=str(number)))
        for _ in range(40):
            engine.step()
        reports: list[StepReport] = []
        stop = engine.engine.watch(reports.append)
        for _ in range(args.steps):
            engine.step()
        stop()
        show(reports)
        sizes(engine)
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                engine.step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def show(reports: list[StepReport]) -> None:
    count = len(reports)
    parts = {
        name: 1e3 * sum(getattr(one.timing, name) for one in reports) / count for name in ("draft", "verify", "rest")
    }
    rows, tokens = (sum(values) / count for values in ([r.timing.rows for r in reports], [r.emitted for r in reports]))
    print(f"{rows:.0f} rows, {tokens:.1f} tokens a step; ms: " + ", ".join(f"{k} {v:.2f}" for k, v in parts.items()))
    slow = Counter(int(1e3 * one.timing.verify) for one in reports)
    print("milliseconds of passes and how often:", sorted(slow.items()))


def sizes(engine: Any) -> None:
    recordings = getattr(engine.target.backend, "recordings", None)
    if recordings is not None:
        graphs = [size for size, step in recordings.steps.items() if step.graph]
        print(
            f"{len(graphs)} recordings of {len(recordings.steps)} sizes, {engine.target.backend._used / 2**20:.0f} MiB"
        )
        print("wanted most:", [(tuple(size.bucket.cost), uses) for size, uses in recordings.wanted.most_common(12)])


if __name__ == "__main__":
    main()
