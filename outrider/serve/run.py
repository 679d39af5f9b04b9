"""Listening: uvicorn around the application, and an end in two steps: refuse what is new, finish what runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from outrider.core.errors import InputError
from outrider.serve.front import Front

POLL_S = 0.05
LAST_PORT = 65535


class Server(uvicorn.Server):
    """The first signal refuses new requests and lets running ones end within the bound; a second one ends at once."""

    def __init__(self, config: uvicorn.Config, front: Front, told: Callable[[str], None]) -> None:
        super().__init__(config)
        self._front, self._told = front, told
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._front.draining:
            self.should_exit = self.force_exit = True
            return
        self._front.draining = True
        self._told(f"ending: {self._front.open_runs} requests may go on for {self._front.settings.drain_s:g} s")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The engine is loaded in here."""
        await super().startup(sockets)
        if self.started:
            settings = self._front.settings
            self._told(f"ready: http://{settings.host}:{settings.port}/v1")

    async def on_tick(self, counter: int) -> bool:
        if self._front.draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._front.settings.drain_s):
                while self._front.open_runs:
                    await asyncio.sleep(POLL_S)
        self.should_exit = True


def serve(app: Starlette, told: Callable[[str], None] = print) -> None:
    """Blocks until a signal ends it. What the engine refuses when it is loaded is raised as it is."""
    front: Front = app.state.front
    settings = front.settings
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=int(settings.keep_alive_s), limit_concurrency=settings.max_connections, backlog=2048,
        timeout_graceful_shutdown=5, h11_max_incomplete_event_size=settings.max_header_bytes, ws="none",
    )  # fmt: skip
    logging.getLogger("uvicorn.error").addFilter(lambda _: app.state.refused is None)  # it would show a traceback
    try:
        with door(settings.host, settings.port) as bound:
            Server(config, front, told).run(sockets=[bound])
    except SystemExit:  # of a start that failed
        raise app.state.refused or RuntimeError("the server did not start") from None


def door(host: str, port: int) -> socket.socket:
    """Bound before a model is loaded, so that a port in use costs nobody a minute."""
    if not 0 <= port <= LAST_PORT:
        raise InputError(f"--port {port}: use 1 to {LAST_PORT}, or 0 for any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen on {host}, port {port} ({error}); choose others with --host and --port"
        ) from None
    made.set_inheritable(True)
    return made
