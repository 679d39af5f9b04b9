"""Frames on a stream of bytes: four bytes of length, then one JSON list of messages.

All that a step brings is one frame: one write, one read and one JSON document for the whole batch. A frame is complete
or it is nothing: what was cut off by a death of the other end is never half believed.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

LENGTH = struct.Struct(">I")
MAX_FRAME = 256 << 20  # bytes; a longer one means that the stream is not ours
Message = list[Any]  # its kind, then what it says


class BadFrame(ValueError):
    """The bytes are no frames: nothing behind them can be trusted."""


def encode(messages: Sequence[Message]) -> bytes:
    body = json.dumps(messages, separators=(",", ":"), default=_plain).encode()
    if len(body) > MAX_FRAME:
        raise BadFrame(f"a frame of {len(body)} bytes, where {MAX_FRAME} is the limit")
    return LENGTH.pack(len(body)) + body


class Frames:
    """Changes state: takes bytes as they come and gives the messages that are complete."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._rest += data
        messages: list[Message] = []
        at = 0
        while len(self._rest) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._rest, at)
            if length > MAX_FRAME:
                raise BadFrame(f"a frame of {length} bytes is announced, where {MAX_FRAME} is the limit")
            end = at + LENGTH.size + length
            if len(self._rest) < end:
                break
            messages += _messages(bytes(self._rest[at + LENGTH.size : end]))
            at = end
        del self._rest[:at]
        return messages


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy."""
    return value.tolist()


def _messages(body: bytes) -> list[Message]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a frame that is no JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, list) and one for one in found):
        raise BadFrame("a frame that is no list of messages")
    return found


class Wire(asyncio.Protocol):
    """One end of a socket. What is said in one round of the event loop leaves in one frame."""

    def __init__(self, hear: Callable[[list[Message]], None], lost: Callable[[], None]) -> None:
        self._hear, self._lost = hear, lost
        self._frames = Frames()
        self._outbox: list[Message] = []
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def say(self, *message: Any) -> None:
        """Into a connection that was lost, nothing is said."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox.append(list(message))

    def flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(messages))

    async def room(self) -> None:
        """Returns once the other end keeps up; until then what comes is better joined than queued."""
        await self._writable.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except BadFrame:
            assert self._transport is not None
            self._transport.abort()
            return
        if messages:
            self._hear(messages)

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self._lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
