"""The engine process of `outrider serve` is killed again and again: are texts the same, and how soon do they go on.

Run: python benchmarks/serving/kills.py [--kills 20] [--spare] [--at-once 16] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from benchmarks.common import give, run
from outrider.bench.load.kills import killed, questions
from outrider.bench.load.servers import Setting, running
from outrider.bench.machine import machine
from outrider.store.prompts import built_in_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=20, help="each is asked greedily and sampled")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    texts = [prompt.raw() for prompt in built_in_prompts()]
    bodies = questions([texts[i % len(texts)] for i in range(args.prompts)], args.max_tokens)
    setting = Setting(args.model, more=("--spare",) if args.spare else ())
    with running("outrider", setting) as server:
        made = asyncio.run(
            killed(server, bodies, args.kills, args.at_once, random.Random(args.seed),
                   lambda line: print(line, file=sys.stderr), args.spare)
        )  # fmt: skip
    seconds = made["resumed_s"]
    lines = [
        f"{made['kills']} kills, {made['streams']} streams: {made['different']} texts differ, "
        f"{len(made['unfinished'])} did not end",
        f"text went on after {seconds['median']:.2f} s (median), {seconds['most']:.2f} s (most)",
        *made["unfinished"][:5],
    ]
    give(args, {**made, "spare": args.spare, "machine": machine()}, lines)
    if made["different"] or made["unfinished"]:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
