"""Server-sent events: one JSON object an event, and an end that frees what ran even if nobody read a byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.serve import errors
from outrider.serve.front import Run

DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class EventResponse(StreamingResponse):
    """Closes the run however it ends. An error in the middle is the last event, in the form of the route."""

    def __init__(self, run: Run, events: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        self._run = run
        more = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, media_type="text/event-stream", headers=more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.aclose()


async def guarded(events: AsyncIterator[bytes], path: str) -> AsyncIterator[bytes]:
    """Errors as events: the status has been sent already."""
    try:
        async for one in events:
            yield one
    except Exception as error:
        told = errors.of(error)
        if path.startswith("/v1/messages"):
            yield event(told.anthropic, "error")
        elif path.startswith("/v1/responses"):
            yield event({"type": "error", "code": told.code, "message": told.message, "param": told.param}, "error")
        else:
            yield event(told.body)
            yield DONE
