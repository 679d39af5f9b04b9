"""Several replicas behind one front: how much of the prompts is found in their caches, by prefix and by chance.

    pip install 'outrider[ray]'
    python benchmarks/serving/replicas.py --replicas 4 --json result.json

Conversations of several turns, each turn the whole past and something new; all conversations take turns, so that a
replica chosen by chance has usually not run the past. The text must not depend on the replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from outrider.core.params import SamplingParams
from outrider.serve.link.seam import Delta, End, Request
from outrider.serve.replicas.link import ReplicasLink, Routing

ROUTINGS: tuple[Routing, ...] = ("prefix", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=192, help="tokens of the first message")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = [asyncio.run(run(args, routing)) for routing in ROUTINGS]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    for row in rows:
        share = row["cached"] / row["prompt"]
        print(f"{row['routing']:7} {share:6.1%} of {row['prompt']:,} prompt tokens cached, {row['seconds']:.1f} s")
    print("same texts" if rows[0]["texts"] == rows[1]["texts"] else "TEXTS DIFFER")


async def run(args: argparse.Namespace, routing: Routing) -> dict[str, Any]:
    settings = {"model": "smollm2", "runtime": "native", "precision": "int8", "max_slots": 4, "max_context": 2048}
    link = ReplicasLink(settings, args.replicas, routing=routing)
    await link.start()
    rng = random.Random(1)
    pasts = [[rng.randrange(1000, 40000) for _ in range(args.first)] for _ in range(args.conversations)]
    prompt, begun = 0, time.perf_counter()
    for turn in range(args.turns):
        order = list(range(args.conversations))
        rng.shuffle(order)
        answers = await asyncio.gather(*(answer(link, f"{turn}-{one}", pasts[one], args.tokens) for one in order))
        prompt += sum(len(pasts[one]) for one in order)
        for one, said in zip(order, answers, strict=True):
            pasts[one] += said + [rng.randrange(1000, 40000) for _ in range(16)]
    seconds = time.perf_counter() - begun
    cached = int((await link.stats())["cached_tokens"])
    await link.close()
    return {"routing": routing, "prompt": prompt, "cached": cached, "seconds": seconds, "texts": pasts}


async def answer(link: ReplicasLink, name: str, prompt: list[int], tokens: int) -> list[int]:
    said: list[int] = []
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=1)
    async for event in await link.submit(Request(name, tuple(prompt), params)):
        if isinstance(event, Delta):
            said += event.tokens
        elif isinstance(event, End) and event.error:
            raise RuntimeError(event.error)
    return said


if __name__ == "__main__":
    main()
