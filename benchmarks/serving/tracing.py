"""What the trace of every request takes from a server's throughput: the same load with and without it, in turns.

python benchmarks/serving/tracing.py [--model smollm2] [--sequences 8] [--rounds 6] [--json FILE]

Each round generates the same prompts once with `trace=True` and once without, in an order that changes from round to
round; the texts must be the same. Rounds before the first counted one warm up. The ratio is that of the medians; what
two runs without a trace differ by stands beside it. On a machine with other work that is more than a trace takes, so
the time inside the trace's own calls is measured as well, as a share of the run in which they were made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import outrider
from outrider.core.trace.trace import Trace
from outrider.store.prompts import built_in_prompts

WARM = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="mix")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--precision")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with outrider.load(args.model, method=args.method, runtime=args.runtime, precision=args.precision) as engine:
        figures = measure(engine, args)
    for name, value in figures.items():
        print(f"{name:>24}  {value}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@contextmanager
def timed() -> Iterator[list[float]]:
    """Seconds in the calls that the engine makes to traces."""
    spent, names = [0.0], ("plan", "offer", "judge", "end")
    before = {name: getattr(Trace, name) for name in names}

    def wrap(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: object, **more: object) -> None:
            begun = time.perf_counter()
            call(*args, **more)
            spent[0] += time.perf_counter() - begun

        return run

    for name, call in before.items():
        setattr(Trace, name, wrap(call))
    yield spent
    for name, call in before.items():
        setattr(Trace, name, call)


def measure(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    prompts = [[{"role": "user", "content": p.turns[0]}] for p in built_in_prompts()]
    prompts = [prompts[i % len(prompts)] for i in range(args.sequences)]
    seconds: dict[str, list[float]] = {"off": [], "on": [], "off again": []}
    texts: dict[str, list[str]] = {}
    shares: list[float] = []
    size = 0
    for number in range(args.rounds + WARM):
        names = list(seconds)
        names = names[number % 3 :] + names[: number % 3]
        for name in names:
            begun = time.perf_counter()
            with timed() as spent:
                made = engine.generate(prompts, max_new_tokens=args.tokens, ignore_eos=True, trace=name == "on",
                                       temperature=args.temperature, seed=number)  # fmt: skip
            took = time.perf_counter() - begun
            if name == "on" and number >= WARM:
                shares.append(spent[0] / took)
            texts[name] = [one.text for one in made]
            size = max([size, *(one.trace.bytes for one in made if one.trace is not None)])
            if number >= WARM:
                seconds[name].append(took)
            print(f"round {number + 1}: {name} {took:.2f} s", file=sys.stderr)
        assert texts["on"] == texts["off"], "a trace changed a text"
    tokens = args.sequences * args.tokens
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = sorted(on / off for on, off in zip(seconds["on"], seconds["off"], strict=True))
    return {
        "tokens_per_s_off": round(tokens / middle["off"], 1),
        "tokens_per_s_on": round(tokens / middle["on"], 1),
        "tokens_per_s_off_again": round(tokens / middle["off again"], 1),
        "slower_by_percent": round(100 * (middle["on"] / middle["off"] - 1), 2),
        "noise_percent": round(100 * (middle["off again"] / middle["off"] - 1), 2),
        "slower_by_percent_paired": round(100 * (statistics.median(ratios) - 1), 2),
        "in_the_trace_percent": round(100 * statistics.median(shares), 2),
        "largest_trace_bytes": size,
    }


if __name__ == "__main__":
    main()
