"""A client that costs little: bytes are kept with the time they came, and read only when the load is over.

A load generator that parses while it measures takes the cores it measures. One connection a request.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

READ_BYTES = 1 << 16
HEAD_BYTES = 1 << 13
DONE = b"[DONE]"


@dataclass(slots=True)
class Exchange:
    """One request and all that came back. Times are of one clock."""

    sent: float = 0.0
    ended: float = 0.0
    raw: bytearray = field(default_factory=bytearray)
    marks: list[tuple[int, float]] = field(default_factory=list)  # bytes there were by then
    error: str = ""

    @property
    def status(self) -> int:
        head = bytes(self.raw[:64]).split(b" ", 2)
        return int(head[1]) if len(head) > 1 and head[1][:3].isdigit() else 0

    @property
    def headers(self) -> dict[str, str]:
        head = bytes(self.raw).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head)}

    def finished(self) -> bool:
        """Whether the answer is whole; not every server closes when it is asked to."""
        if self.raw.endswith(b"\r\n0\r\n\r\n"):
            return True
        at = self.raw.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if at < 0 or b"chunked" in self.raw[:at].lower():
            return False
        length = self.headers.get("content-length")
        return length is not None and len(self.raw) >= at + 4 + int(length)

    def parts(self) -> Iterator[tuple[float, bytes]]:
        """The body as it was delivered: each chunk with the time at which it was complete."""
        raw = bytes(self.raw)
        at = raw.find(b"\r\n\r\n") + 4
        if at < 4:
            return
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            yield self.ended, raw[at:]
            return
        while (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end].split(b";")[0] or b"0", 16)
            start, at = end + 2, end + 2 + size + 2
            if size == 0 or at > len(raw):
                return
            yield self._when(start + size), raw[start : start + size]

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts())

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The data of server-sent events, each with its time; the end mark too."""
        rest = b""
        for when, part in self.parts():
            *whole, rest = (rest + part.replace(b"\r\n", b"\n")).split(b"\n\n")
            for event in whole:
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    yield when, b"\n".join(lines)

    def _when(self, length: int) -> float:
        return self.marks[min(bisect_left(self.marks, (length, 0.0)), len(self.marks) - 1)][1]


@dataclass(frozen=True, slots=True)
class Read:
    """What an exchange said, once somebody looks."""

    sent: float
    ended: float
    status: int
    text: str
    tokens: int  # 0 where the server does not count them
    finish: str
    deliveries: tuple[float, ...]  # when text came
    error: str

    @property
    def complete(self) -> bool:
        return self.status == 200 and bool(self.finish) and not self.error


async def post(
    host: str, port: int, path: str, body: Mapping[str, Any] | bytes, *, headers: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> Exchange:  # fmt: skip
    """Send, and read the answer. Never raises for what the other side does: see `error`."""
    made = Exchange()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": f"{host}:{port}", "Content-Type": "application/json", "Content-Length": str(len(content)),
             "Connection": "close", **(headers or {})}  # fmt: skip
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    made.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(head.encode("latin-1") + content)
                await writer.drain()
                while not made.finished() and (piece := await reader.read(READ_BYTES)):
                    made.raw += piece
                    made.marks.append((len(made.raw), time.perf_counter()))
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        made.error = f"{type(error).__name__}: {error}".strip(": ")
    made.ended = time.perf_counter()
    return made


def read_chat(made: Exchange) -> Read:
    """A streamed chat completion: its text, when pieces of it came, and what the usage counts."""
    text: list[str] = []
    times: list[float] = []
    finish, tokens = "", 0
    error = made.error or ("" if made.status == 200 else bytes(made.raw[-300:]).decode(errors="replace"))
    for when, event in made.events():
        if event == DONE:
            continue
        try:
            said = json.loads(event)
        except ValueError:
            error = error or f"an event that is no JSON: {event[:80]!r}"
            continue
        if "error" in said:
            error = error or str(said["error"])
        tokens = (said.get("usage") or {}).get("completion_tokens", tokens)
        for choice in said.get("choices") or ():
            if piece := (choice.get("delta") or {}).get("content") or choice.get("text"):
                text.append(piece)
                if not times or when > times[-1]:
                    times.append(when)
            finish = choice.get("finish_reason") or finish
    return Read(made.sent, made.ended, made.status, "".join(text), tokens, finish, tuple(times), error)
