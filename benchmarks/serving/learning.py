"""What `serve --learn` brings and costs: one stream of requests to a server that learns, and to one that does not.

Chat first, which the drafter knows, then SQL, which it does not, `--at-once` requests under way at any time. Figures
are of windows of so many requests, in order: accepted length, and tokens a second of the wall clock, whatever the
updates took. The texts are compared, because they must be the same.
Run: python benchmarks/serving/learning.py [--device cuda --dtype bfloat16] [--method eagle3] [--chat N] [--sql N]
     [--at-once N] [--share X] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import outrider
from benchmarks.common import give, run
from benchmarks.training.online import CHAT, TABLES
from outrider.core.params import SamplingParams
from outrider.serve.link import learning
from outrider.serve.link.local import LocalLink
from outrider.serve.link.seam import Delta, End, Request


@dataclass(frozen=True, slots=True)
class Answered:
    tokens: tuple[int, ...]
    steps: int
    ended: float  # seconds since the stream began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--chat", type=int, default=24)
    parser.add_argument("--sql", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--window", type=int, default=12, help="requests of one figure")
    parser.add_argument("--share", type=float, default=learning.SHARE, help="of the time that updates may take")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    learning.SHARE = args.share
    sql = [f"Write a SQL CREATE TABLE statement and three INSERT statements for a table of {name}." for name in TABLES]
    asked = [("chat", CHAT[i % len(CHAT)]) for i in range(args.chat)]
    asked += [("SQL", sql[i % len(sql)]) for i in range(args.sql)]
    with tempfile.TemporaryDirectory() as folder:
        frozen, _ = asyncio.run(stream(args, asked, None))
        learnt, figures = asyncio.run(stream(args, asked, f"{folder}/learnt"))
    lines, curve = ["domain  accepted length, tokens/s: frozen, learning"], []
    for first in range(0, len(asked), args.window):
        part = slice(first, first + args.window)
        both = [window(made, part) for made in (frozen, learnt)]
        curve.append({"domain": asked[first][0], "frozen": both[0], "learning": both[1]})
        said = ", ".join(f"{length:.2f} {speed:7.1f}" for length, speed in both)
        lines.append(f"{asked[first][0]:6}  {said}   {both[1][1] / both[0][1]:.3f}x")
    same = sum(a.tokens == b.tokens for a, b in zip(frozen, learnt, strict=True))
    lines.append(f"same text in {same} of {len(asked)} requests; {figures}")
    give(args, {"curve": curve, "figures": figures, "same_text": same}, lines)


async def stream(args: Any, asked: list[tuple[str, str]], learn: str | None) -> tuple[list[Answered], dict[str, Any]]:
    """All requests in order, so many at once; and the server's figures of what it learnt."""
    settings = {"device": args.device, "dtype": args.dtype, "max_slots": args.at_once, "max_context": 2048}
    link = LocalLink(lambda: outrider.load(args.model, args.method, **settings), learn=learn)
    await link.start()
    try:
        for number, (_, text) in enumerate(asked[:2]):  # what is compiled or recorded first is not the stream's
            await answer(link, args, f"warm {number}", text, 0.0)
        begun, gate = time.perf_counter(), asyncio.Semaphore(args.at_once)

        async def one(number: int, text: str) -> Answered:
            async with gate:
                return await answer(link, args, str(number), text, begun)

        made = await asyncio.gather(*(one(number, text) for number, (_, text) in enumerate(asked)))
        figures = {name: value for name, value in (await link.stats()).items() if "learn" in name}
        return list(made), figures
    finally:
        await link.close()


async def answer(link: LocalLink, args: Any, id: str, text: str, begun: float) -> Answered:
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    prompt = tuple(link.outrider.encode_chat(text))
    tokens: list[int] = []
    steps = 0
    async for event in await link.submit(Request(id, prompt, params)):
        if isinstance(event, Delta):
            tokens += event.tokens
        elif isinstance(event, End):
            steps = int(event.stats["steps"])
    return Answered(tuple(tokens), steps, time.perf_counter() - begun)


def window(made: list[Answered], part: slice) -> tuple[float, float]:
    """Accepted length, and tokens a second between the ends of the first and the last request of a window."""
    before = max((one.ended for one in made[: part.start]), default=0.0)
    tokens = sum(len(one.tokens) for one in made[part])
    seconds = max(max(one.ended for one in made[part]) - before, 1e-9)
    return tokens / max(sum(one.steps for one in made[part]), 1), tokens / seconds


if __name__ == "__main__":
    run(main)
