"""Clients as they come: some read slowly, some leave in mid-answer, some send half of a request or nonsense, many idle.

A mixed load runs for as long as asked; beside it, well-behaved clients check that their answers are what they were.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.bench.load.client import post, read_chat
from outrider.bench.load.kills import engines_of
from outrider.bench.load.servers import HOST, Server

PATH = "/v1/chat/completions"
NONSENSE = (
    b"{", b"[]", b"null", b'{"messages": 5}', b'{"messages": [{"role": "user"}], "max_tokens": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', b"\xff\xfe",
    b'{"messages": [' + b"[" * 5000,
    b'{"messages": [{"role": "user", "content": "x"}], "n": 99999999999999999999}',
)  # fmt: skip
SETTLE_S = 3.0
Act = Callable[[], Awaitable[None]]


class Mixed:
    """A mixed load on one server. Changes state: counts what was done, and what went wrong."""

    def __init__(self, server: Server, bodies: Sequence[dict[str, Any]], chance: random.Random) -> None:
        self.server, self.bodies, self.chance = server, bodies, chance
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.expected: list[str] = []

    async def learn(self) -> None:
        """The answers while nothing else happens."""
        self.expected = [read_chat(await post(HOST, self.server.port, PATH, body)).text for body in self.bodies]

    async def run(self, seconds: float, clients: int, idle: int, least_aborts: int = 0) -> dict[str, Any]:
        """Until the time is over, and so many have left in mid-answer. Memory before and after, in bytes."""
        before = memory(self.server)
        connections = [await asyncio.open_connection(HOST, self.server.port) for _ in range(idle)]
        until = time.monotonic() + seconds
        acts: dict[str, Act] = {"answers": self.answer, "aborts": self.abort, "slow readers": self.slow,
                                "half requests": self.half, "nonsense": self.nonsense}  # fmt: skip

        async def client() -> None:
            while time.monotonic() < until or self.done["aborts"] < least_aborts:
                (name,) = self.chance.choices([*acts], [3, 8, 1, 2, 2])
                await acts[name]()
                self.done[name] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        for _, writer in connections:
            writer.close()
        await self.answer()
        await asyncio.sleep(SETTLE_S)
        busy = [one for one in get(self.server, "/slots") if one["is_processing"]]
        return {"done": dict(self.done), "wrong": self.wrong, "idle connections": idle, "busy after": len(busy),
                "bytes before": before, "bytes after": memory(self.server)}  # fmt: skip

    async def answer(self) -> None:
        place = self.chance.randrange(len(self.bodies))
        read = read_chat(await post(HOST, self.server.port, PATH, self.bodies[place]))
        if not read.complete:
            self.wrong.append(f"no answer: {read.status} {read.error[:200]}")
        elif read.text != self.expected[place]:
            self.wrong.append(f"another answer than before: {read.text[:60]!r}, not {self.expected[place][:60]!r}")

    async def abort(self) -> None:
        """Leaves after some deliveries, or at once."""
        reader, writer = await self._sent(self._long())
        for _ in range(self.chance.randrange(6)):
            if not await reader.read(4096):
                break
        await self._gone(writer)

    async def slow(self) -> None:
        """Takes a little, waits, takes a little; then has had enough."""
        reader, writer = await self._sent(self._long())
        for _ in range(20):
            if not await reader.read(64):
                break
            await asyncio.sleep(0.1)
        await self._gone(writer)

    async def half(self) -> None:
        """A body that stops in the middle."""
        content = json.dumps(self._long()).encode()
        _, writer = await asyncio.open_connection(HOST, self.server.port)
        writer.write(self._head(len(content)) + content[: self.chance.randrange(len(content))])
        await asyncio.sleep(self.chance.uniform(0.0, 0.5))
        await self._gone(writer)

    async def nonsense(self) -> None:
        made = await post(HOST, self.server.port, PATH, self.chance.choice(NONSENSE), timeout_s=30.0)
        if not 400 <= made.status < 500:
            self.wrong.append(f"nonsense was answered with {made.status} {made.error}")

    def _long(self) -> dict[str, Any]:
        return {**self.chance.choice(self.bodies), "max_tokens": 400, "ignore_eos": True}

    def _head(self, length: int) -> bytes:
        lines = (
            f"POST {PATH} HTTP/1.1",
            f"Host: {HOST}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        )
        return "\r\n".join([*lines, "", ""]).encode()

    async def _sent(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(HOST, self.server.port)
        writer.write(self._head(len(content)) + content)
        await writer.drain()
        return reader, writer

    async def _gone(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def memory(server: Server) -> int:
    """Resident bytes of the front and its engines."""
    total = 0
    for pid in (server.process.pid, *engines_of(server.process.pid)):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url(path), timeout=30) as answer:
        return json.load(answer)
