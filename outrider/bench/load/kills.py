"""Kills of a server's engine process while it answers: whether every text is that of an unbroken run, and how soon.

Over HTTP, from outside, with SIGKILL. Texts of an unbroken run under plain decoding are what is compared with.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.load.client import Exchange, Read, post, read_chat
from outrider.bench.load.figures import percentile
from outrider.bench.load.servers import HOST, Server
from outrider.core.errors import OutriderError

WORKER = "outrider.serve.process.worker"
ECHO_S = 0.1  # what was on its way when the engine was killed has come by then
WAIT_S = 120.0


def engines_of(pid: int) -> list[int]:
    """Engine processes that this server has started, the oldest first: that one answers, a second one is spare."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                line = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(stat[1]) == pid and WORKER.encode() in line and stat[0] != "Z":
                found.append((int(stat[19]), int(folder.name)))
    return [number for _, number in sorted(found)]


def questions(texts: Sequence[str], max_tokens: int) -> list[dict[str, Any]]:
    """Each text twice: greedy, and sampled with a seed."""
    return [
        {
            "model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
            "stream": True, "temperature": temperature, "seed": seed,
        }
        for seed, text in enumerate(texts)
        for temperature in (0.0, 0.8)
    ]  # fmt: skip


async def answers(server: Server, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Exchange]:
    places = asyncio.Semaphore(at_once)

    async def ask(body: dict[str, Any]) -> Exchange:
        async with places:
            return await post(HOST, server.port, "/v1/chat/completions", body)

    return list(await asyncio.gather(*(ask(body) for body in bodies)))


async def killed(
    server: Server, bodies: Sequence[dict[str, Any]], kills: int, at_once: int, chance: random.Random,
    said: Callable[[str], None] = print, spare: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Figures: texts that differ, streams that did not end, and seconds until the first text behind each kill.

    With `spare` a kill waits until the spare engine is loaded.
    """
    expected = [read_chat(one).text for one in await answers(server, [{**b, "method": "plain"} for b in bodies], 4)]
    times: list[float] = []
    done = asyncio.Event()

    async def kill() -> None:
        try:
            while len(times) < kills:
                await _until_ready(server, spare)
                await asyncio.sleep(chance.uniform(0.1, 1.5))
                os.kill(engines_of(server.process.pid)[0], signal.SIGKILL)
                times.append(time.perf_counter())
                said(f"kill {len(times)} of {kills}")
                await asyncio.sleep(ECHO_S)
        finally:
            done.set()

    killing = asyncio.create_task(kill())
    read: list[Read] = []
    different: list[str] = []
    while not done.is_set():
        shuffled = chance.sample(range(len(bodies)), len(bodies))
        asked = [{**bodies[i], **({"method": "plain"} if chance.random() < 0.5 else {})} for i in shuffled]
        round_ = [read_chat(one) for one in await answers(server, asked, at_once)]
        read += round_
        different += [one.text for i, one in zip(shuffled, round_, strict=True) if one.text != expected[i]]
    await killing
    deliveries = sorted(when for one in read for when in one.deliveries)
    resumed = [next((when - at for when in deliveries if when > at + ECHO_S), float("nan")) for at in times]
    whole = [seconds for seconds in resumed if seconds == seconds]
    return {
        "kills": kills,
        "streams": len(read),
        "different": len(different),
        "unfinished": [one.error or "no end" for one in read if not one.complete],
        "resumed_s": {"median": percentile(whole, 50), "most": max(whole, default=float("nan"))},
    }


async def _until_ready(server: Server, spare: bool) -> None:
    """The engine answers, and the spare one is loaded where there is one to be."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if await asyncio.to_thread(server.up, "/ready") and (not spare or await asyncio.to_thread(_spares, server)):
            return
        await asyncio.sleep(0.02)
    raise OutriderError(f"the server was not ready again within {WAIT_S:.0f} s")


def _spares(server: Server) -> bool:
    with urllib.request.urlopen(server.url("/metrics"), timeout=WAIT_S) as answer:
        return any(line.startswith(b"outrider:spare_engines") and line.split()[-1] != b"0.0" for line in answer)
