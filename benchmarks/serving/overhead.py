"""What HTTP and the second process add to a text: time to first token and time a token, against the engine itself.

The same prompts, greedily, in this process and through `outrider serve`, in turns; then how soon a full queue says so.
Figures so far are told after every round. On two cores it takes about a minute and a half with 3 rounds.
Run: python benchmarks/serving/overhead.py [--rounds 3] [--prompts 4] [--max-tokens 64] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import outrider
from benchmarks.common import give, run
from outrider.api import Outrider
from outrider.bench.load.client import post, read_chat
from outrider.bench.load.figures import percentile
from outrider.bench.load.servers import HOST, Server, Setting, running
from outrider.bench.machine import machine
from outrider.store.prompts import built_in_prompts

PATH = "/v1/chat/completions"
REFUSED = 50
LONG = 1500  # tokens of a text that keeps the server busy


def direct(engine: Outrider, text: str, max_tokens: int, method: str) -> tuple[float, float, str]:
    """Seconds to the first text, and to the last one behind it."""
    begun = time.perf_counter()
    stream = engine.stream(engine.encode_chat(text), max_new_tokens=max_tokens, method=method, ignore_eos=True)
    first = last = 0.0
    pieces = []
    for piece in stream:
        last = time.perf_counter()
        first = first or last
        pieces.append(piece)
    return first - begun, last - first, "".join(pieces)


async def over_http(server: Server, text: str, max_tokens: int, method: str) -> tuple[float, float, str]:
    read = read_chat(await post(HOST, server.port, PATH, body(text, max_tokens, method)))
    assert read.complete, read.error
    return read.deliveries[0] - read.sent, read.deliveries[-1] - read.deliveries[0], read.text


def body(text: str, max_tokens: int, method: str) -> dict[str, Any]:
    return {
        "model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True,
        "temperature": 0.0, "method": method, "ignore_eos": True,
    }  # fmt: skip


async def refusals(server: Server, text: str) -> list[float]:
    """Milliseconds until 429, while one text runs and one waits."""
    busy = [asyncio.create_task(post(HOST, server.port, PATH, body(text, LONG, "plain"))) for _ in range(2)]
    await asyncio.sleep(1.0)
    times = []
    while len(times) < REFUSED:
        assert not any(task.done() for task in busy), "a text that was to keep the server busy has ended"
        made = await post(HOST, server.port, PATH, body(text, 10, "plain"))
        if made.status == 429:
            times.append(1e3 * (made.ended - made.sent))
    for task in busy:
        task.cancel()
    return times


def added(method: str, row: dict[str, float]) -> str:
    return (
        f"{method}: HTTP adds {row['first_ms']:.2f} ms to the first text (90th percentile {row['first_p90']:.2f}) "
        f"and {row['token_ms']:.3f} ms a token ({row['token_p90']:.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    texts = [prompt.raw() for prompt in built_in_prompts()][: args.prompts]
    table: dict[str, dict[str, float]] = {}
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)  # as many on either side
    setting = Setting(args.model, threads=threads)
    with running("outrider", setting) as server, outrider.load(args.model) as engine:
        for method in ("plain", "mix"):
            first: list[float] = []
            token: list[float] = []
            for number in range(args.rounds + 1):
                for place, text in enumerate(texts):
                    asked = f"({number} {method}) {text}"  # new to both caches
                    made = {}
                    for side in (0, 1) if place % 2 else (1, 0):
                        if side:
                            made[side] = asyncio.run(over_http(server, asked, args.max_tokens, method))
                        else:
                            made[side] = direct(engine, asked, args.max_tokens, method)
                    assert method != "plain" or made[0][2] == made[1][2], "another text"
                    if number:  # the first round warms up
                        first.append(1e3 * (made[1][0] - made[0][0]))
                        token.append(1e3 * (made[1][1] - made[0][1]) / (args.max_tokens - 1))
                if number:
                    table[method] = {"first_ms": statistics.median(first), "token_ms": statistics.median(token),
                                     "first_p90": percentile(first, 90), "token_p90": percentile(token, 90),
                                     "pairs": len(first)}  # fmt: skip
                    print(f"after {number} rounds: {added(method, table[method])}", file=sys.stderr, flush=True)
    with running("outrider", replace(setting, more=("--max-slots", "1", "--max-waiting", "1"))) as server:
        waits = asyncio.run(refusals(server, texts[0]))
    lines = [
        *(added(method, row) for method, row in table.items()),
        f"a full queue says so after {percentile(waits, 50):.1f} ms (median), {max(waits):.1f} ms (the longest)",
    ]  # fmt: skip
    give(args, {"added": table, "refused_ms": waits, "machine": machine()}, lines)


if __name__ == "__main__":
    run(main)
