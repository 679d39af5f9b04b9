"""Gaps between deliveries while a long prompt arrives, and the first token behind a prefix that was met before.

Eight answers run; after a while a prompt of 2,000 tokens comes. The 99th percentile of the gaps between two deliveries
of an answer is given for the time before and for the time in which the prompt runs; and how long the prompt takes.
Then one prompt of 1,000 tokens twice, the second with another ending: what the first token of each takes.
Run: python benchmarks/serving/gaps.py [--sequences 8] [--prompt-tokens 2000] [--runtime native] [--precision int8]
     [--method plain] [--rounds 3] [--json [FILE]]
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import outrider
from benchmarks.common import arguments, give, run
from outrider.api import Outrider
from outrider.core.params import SamplingParams
from outrider.core.schedule import Delivery, Terms

WORDS = "the rain falls on the old town and a boat goes by while nobody looks at the clock of the station ".split()


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=400)
    parser.add_argument("--runtime", default="native")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--method", default="plain")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    args = parser.parse_args()
    with outrider.load(
        args.model, method=args.method, device=args.device, dtype=args.dtype, runtime=args.runtime,
        precision=args.precision, max_slots=args.sequences + 1, max_context=args.prompt_tokens + 600,
    ) as engine:  # fmt: skip
        gaps(engine, 2, 64, 40)  # what is compiled at first use does not count
        rounds = [gaps(engine, args.sequences, args.prompt_tokens, args.max_new_tokens) for _ in range(args.rounds)]
        firsts = [prefix(engine, number) for number in range(args.rounds)]
    figures = {name: median(one[name] for one in some) for some in (rounds, firsts) for name in some[0]}
    payload = {
        "milliseconds": figures,
        "gap_ratio": median(one["while the prompt runs"] / one["before"] for one in rounds),
        "prefix_ratio": median(one["second behind its prefix"] / one["first"] for one in firsts),
    }
    lines = [*(f"{name}: {ms:.1f} ms" for name, ms in figures.items()),
             f"gaps: {payload['gap_ratio']:.2f}x, first token: {payload['prefix_ratio']:.2f}x"]  # fmt: skip
    give(args, payload, lines)


def text(engine: Outrider, tokens: int, ending: str = "") -> list[int]:
    ids: list[int] = engine.encode(" ".join(WORDS[i % len(WORDS)] for i in range(2 * tokens)))[:tokens]
    return [*ids, *engine.encode(ending)] if ending else ids


def gaps(engine: Outrider, sequences: int, tokens: int, length: int) -> dict[str, float]:
    """The 99th percentile between two deliveries of an answer, before and while a prompt runs."""
    inner, arrivals = engine.engine, dict[int, list[float]]()

    def listener(delivery: Delivery) -> None:
        arrivals.setdefault(delivery.request, []).append(time.perf_counter())

    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    handles = [
        inner.submit(engine.encode(f"Story {i}:"), params, engine.recipe(), listener=listener,
                     terms=Terms(cache_salt=str(time.time())))
        for i in range(sequences)
    ]  # fmt: skip
    while min((len(times) for times in arrivals.values()), default=0) < length // 4:
        inner.step()
    came = time.perf_counter()
    late = inner.submit(text(engine, tokens), params.with_(max_new_tokens=1), engine.recipe(),
                        terms=Terms(cache_salt=str(came)))  # fmt: skip
    while not late.done:
        inner.step()
    ran = time.perf_counter()
    for handle in handles:
        handle.cancel()
    inner.step()
    pairs = [(b, b - a) for times in arrivals.values() for a, b in pairwise(times)]
    idle, beside = [g for at, g in pairs if at <= came], [g for at, g in pairs if came < at <= ran]
    return {"before": p99(idle), "while the prompt runs": p99(beside), "the prompt": 1e3 * (ran - came)}


def p99(seconds: list[float]) -> float:
    return 1e3 * quantiles(seconds, n=100)[98] if len(seconds) > 1 else 1e3 * max(seconds, default=0.0)


def prefix(engine: Outrider, number: int) -> dict[str, float]:
    found: dict[str, Any] = {}
    for name, ending in (("first", "Once"), ("second behind its prefix", "Twice")):
        begun = time.perf_counter()
        engine.engine.submit(
            text(engine, 1000, ending), SamplingParams(max_new_tokens=1), engine.recipe(),
            terms=Terms(cache_salt=f"prefix {number}"),
        ).result()  # fmt: skip
        found[name] = 1e3 * (time.perf_counter() - begun)
    return found


if __name__ == "__main__":
    run(main)
