"""One of several engines: what runs in a replica's process, and answers the front over Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from outrider.core.errors import OutriderError
from outrider.serve.link.local import LocalLink
from outrider.serve.process.records import pack_error, pack_event, pack_info, unpack_request


class Replica:
    """Ray Serve makes one a process. `settings` are what `outrider.load` takes, `limits` what `LocalLink` takes."""

    def __init__(self, settings: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
        from outrider.api import load

        self._link = LocalLink(lambda: load(**settings), **limits)

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Ray Serve awaits this before it counts the replica among those that run."""
        await self._link.start()

    async def info(self) -> dict[str, Any]:
        return pack_info(self._link.info)

    async def run(self, packed: Mapping[str, Any], beginnings: list[str]) -> AsyncIterator[list[Any]]:
        """First whether the request was taken, then its events, those of a step together. `beginnings` are for the
        router. Whoever stops reading cancels the request."""
        try:
            stream = await self._link.submit(unpack_request(packed))
        except OutriderError as error:
            yield ["refused", pack_error(error)]
            return
        try:
            yield ["taken"]
            async for event in stream:
                yield ["event", pack_event(event)]
        finally:
            await stream.aclose()
