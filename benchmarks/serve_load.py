"""Servers under load, one after the other on one machine: closed loops of clients, then Poisson arrivals.

Each system is started apart, asked from this process, and stopped before the next one. `1,2,4,8` clients ask again as
soon as they are answered; at a rate requests come whether earlier ones are answered or not. Every request is new text
in front, so that no cache of earlier prompts answers it. Results are added to --out as they come, and tables are made
of all of it. On two cores a system takes three to four minutes.
Run: python benchmarks/serve_load.py --out FILE.jsonl [--systems outrider,llama.cpp,...] [--concurrent 1,2,4,8]
     [--rates 0.25,0.5,1,1.5,2] [--requests 6] [--seconds 12] [--max-tokens 64] [--report]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import run

from outrider.bench.load.client import Exchange, post, read_chat
from outrider.bench.load.figures import figures, table
from outrider.bench.load.servers import HOST, SYSTEMS, Server, Setting, command, running
from outrider.bench.machine import machine
from outrider.core.errors import InputError, OutriderError
from outrider.store.prompts import built_in_prompts, read_prompts

WARM_UP = 3
Body = Callable[[int], dict[str, Any]]


def main() -> None:
    args = arguments()
    if args.report:
        rows = [json.loads(line) for line in Path(args.out).read_text(encoding="utf-8").splitlines()]
        print("\n".join(table(sorted(rows, key=lambda row: (row["order"], SYSTEMS.index(row["system"]))))))
        return
    setting, count = prepared(args)
    systems = args.systems.split(",")
    for name in systems:
        command(name, 0, setting)  # names and environments are checked before anything starts
    prompts = read_prompts(args.prompts) if args.prompts else built_in_prompts()
    texts = [prompt.raw() for prompt in prompts]
    for number in range(args.rounds):
        for name in systems:
            try:
                with running(name, setting, args.start_s) as server:
                    for row in measured(args, server, texts, count, seed=number):
                        with Path(args.out).open("a", encoding="utf-8") as out:
                            out.write(json.dumps({**row, "round": number, "machine": machine()}) + "\n")
                        print("\n".join(table([row])[2:]), file=sys.stderr, flush=True)
            except OutriderError as error:
                print(f"without {name}: {error}", file=sys.stderr, flush=True)


def measured(
    args: argparse.Namespace, server: Server, texts: Sequence[str], count: Callable[[str], int], seed: int
) -> Iterator[dict[str, Any]]:  # fmt: skip
    def body_of(load: str) -> Body:
        """Requests of a load, the same for every system."""

        def body(number: int) -> dict[str, Any]:
            text = f"({load}, {seed}.{number})\n{texts[number % len(texts)]}"
            return {
                "model": server.model, "messages": [{"role": "user", "content": text}], "temperature": 0.0,
                "max_tokens": args.max_tokens, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip

        return body

    asyncio.run(closed(server, body_of("warm-up"), 2, WARM_UP))
    for order, clients in enumerate(args.concurrent):
        load = f"{clients} at once"
        made = asyncio.run(closed(server, body_of(load), clients, args.requests + 2 * clients))
        yield {"order": order, "load": load, "system": server.name, **figures(read(made), count)}
    for order, rate in enumerate(args.rates, len(args.concurrent)):
        load = f"{rate:g} a second"
        made = asyncio.run(opened(server, body_of(load), rate, args.seconds, random.Random(f"{seed} {rate}")))
        yield {"order": order, "load": load, "system": server.name, **figures(read(made), count)}


async def closed(server: Server, body: Body, clients: int, requests: int) -> list[Exchange]:
    """So many clients, each asking again as soon as it is answered."""
    numbers = iter(range(requests))

    async def client() -> list[Exchange]:
        return [await ask(server, body(number)) for number in numbers]

    return [made for each in await asyncio.gather(*(client() for _ in range(clients))) for made in each]


async def opened(server: Server, body: Body, rate: float, seconds: float, random: random.Random) -> list[Exchange]:
    """Arrivals of a Poisson process: nobody waits for an answer before the next one asks."""
    loop = asyncio.get_running_loop()
    begun, at, asked = loop.time(), random.expovariate(rate), []
    while at < seconds:
        await asyncio.sleep(max(0.0, begun + at - loop.time()))
        asked.append(asyncio.create_task(ask(server, body(len(asked)))))
        at += random.expovariate(rate)
    return list(await asyncio.gather(*asked))


async def ask(server: Server, body: dict[str, Any]) -> Exchange:
    return await post(HOST, server.port, "/v1/chat/completions", body)


def read(made: Sequence[Exchange]) -> list[Any]:
    return [read_chat(one) for one in made]


def prepared(args: argparse.Namespace) -> tuple[Setting, Callable[[str], int]]:
    """The model in both forms, and how its tokens are counted."""
    from outrider.bench.systems import _embedded_gguf
    from outrider.bench.twin import twin_gguf
    from outrider.models import load_model
    from outrider.models.embedded import NAME

    loaded = load_model(args.model, device="cpu")
    gguf = args.gguf
    if gguf is None and args.model == NAME and "llama.cpp" in args.systems:
        gguf = str(twin_gguf(_embedded_gguf(), "f32"))
    folder = str(loaded.model.name_or_path)
    tokenizer = loaded.tokenizer
    setting = Setting(folder, gguf or "", threads=args.threads, slots=args.slots, more=tuple(args.more.split()))
    return setting, lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", "--json", required=True, metavar="FILE", help="JSON lines, added to")
    parser.add_argument("--report", action="store_true", help="tables of what --out holds; measures nothing")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gguf", help="the model for llama.cpp, in the same precision")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL; the built-in prompts without it")
    parser.add_argument("--concurrent", type=numbers(int), default=[1, 2, 4, 8])
    parser.add_argument("--rates", type=numbers(float), default=[0.25, 0.5, 1.0, 1.5, 2.0])
    parser.add_argument("--requests", type=int, default=6, help="of a closed loop, and two more a client")
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals at a rate")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--start-s", type=float, default=600.0, help="that a server may take to answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--more", default="", help="further arguments for our server")
    return parser.parse_args()


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",") if part]
        except ValueError:
            raise InputError(f"{text}: write numbers with commas between them, such as 1,4") from None

    return parse


if __name__ == "__main__":
    run(main)
