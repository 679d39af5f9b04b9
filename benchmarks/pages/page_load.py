"""What the page takes from a server under load: an open fleet view, a trace of every request, and neither, in turns.

Clients ask again as soon as they are answered. In each window either nobody looks, or the fleet view asks once a second
as the page does, or every request is traced as the page's are. Run: python benchmarks/pages/page_load.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.bench.load.client import post
from outrider.bench.load.servers import HOST, Server, Setting, running
from outrider.models.embedded import embedded_model
from outrider.store.prompts import built_in_prompts

KINDS = ("nobody", "fleet", "traced", "nobody again")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--window", type=float, default=6.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    setting = Setting(str(embedded_model()), more=("--runtime", "native", "--precision", "int8"))
    with running("outrider", setting) as server:
        speeds = asyncio.run(measured(server, args))
    medians = {kind: statistics.median(speeds[kind]) for kind in KINDS}
    base = statistics.mean([medians["nobody"], medians["nobody again"]])
    result = {
        "tokens/s": {kind: round(speed, 1) for kind, speed in medians.items()},
        "slower by %": {kind: round(100 * (1 - medians[kind] / base), 2) for kind in KINDS[1:3]},
        "noise %": round(100 * abs(medians["nobody"] - medians["nobody again"]) / base, 2),
    }
    if args.json:
        Path(args.json).write_text(json.dumps({**result, "windows": speeds}, indent=1))
    print(json.dumps(result, indent=1))


async def measured(server: Server, args: argparse.Namespace) -> dict[str, list[float]]:
    texts = [prompt.raw() for prompt in built_in_prompts()]
    said: Counter[str] = Counter()
    kind, number = "warm", 0

    async def client() -> None:
        nonlocal number
        while True:
            number += 1
            body: dict[str, Any] = {
                "model": server.model, "prompt": f"{number}. {texts[number % len(texts)]}", "max_tokens": args.tokens,
                "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            if kind == "traced":
                body["outrider"] = {"trace": True, "origins": True}
            asked = kind
            made = await post(HOST, server.port, "/v1/completions", body)
            said[asked] += json.loads(made.body)["usage"]["completion_tokens"]

    clients = [asyncio.create_task(client()) for _ in range(args.clients)]
    speeds: dict[str, list[float]] = {name: [] for name in KINDS}
    await asyncio.sleep(2 * args.window)
    for turn in range(args.rounds):
        for kind in (*KINDS[turn % 4 :], *KINDS[: turn % 4]):
            before, begun = said.total(), time.perf_counter()
            while (left := begun + args.window - time.perf_counter()) > 0:
                if kind == "fleet":
                    await _fleet(server)
                await asyncio.sleep(min(1.0, left))
            speeds[kind].append((said.total() - before) / (time.perf_counter() - begun))
    for task in clients:
        task.cancel()
    return speeds


async def _fleet(server: Server) -> None:
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(b"GET /v1/outrider/fleet HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    assert b" 200 " in answer[:20], answer[:200]
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


if __name__ == "__main__":
    main()
