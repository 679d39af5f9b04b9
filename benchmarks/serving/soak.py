"""Mixed load on `outrider serve` for as long as asked: answers, slow readers, clients that leave, nonsense, idle ones.

Run: python benchmarks/serving/soak.py --minutes 60 [--clients 12] [--idle 200] [--spare] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from benchmarks.common import give, run
from outrider.bench.load.abuse import Mixed
from outrider.bench.load.kills import questions
from outrider.bench.load.servers import Setting, running
from outrider.bench.machine import machine
from outrider.store.prompts import built_in_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--idle", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    bodies = questions([prompt.raw() for prompt in built_in_prompts()][:8], args.max_tokens)
    setting = Setting(args.model, more=("--spare",) if args.spare else ())
    with running("outrider", setting) as server:
        made = asyncio.run(soaked(Mixed(server, bodies, random.Random(args.seed)), args))
    growth = (made["bytes after"] - made["bytes before"]) / 2**20
    lines = [
        f"{args.minutes:g} minutes: " + ", ".join(f"{count} {name}" for name, count in sorted(made["done"].items())),
        f"{len(made['wrong'])} wrong; {made['busy after']} places in use afterwards; memory {growth:+.0f} MiB",
        *made["wrong"][:5],
    ]
    give(args, {**made, "machine": machine()}, lines)
    if made["wrong"] or made["busy after"]:
        sys.exit(1)


async def soaked(mixed: Mixed, args: argparse.Namespace) -> dict[str, object]:
    await mixed.learn()
    await mixed.run(min(30.0, 6.0 * args.minutes), args.clients, args.idle)  # caches fill: what grows behind is a leak
    return await mixed.run(60.0 * args.minutes, args.clients, args.idle)


if __name__ == "__main__":
    run(main)
