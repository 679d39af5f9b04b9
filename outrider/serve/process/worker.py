"""The engine's end of the socket: a process that loads a model, runs what it is told, and ends with its front.

Started by `engines.py` as `python -m outrider.serve.process.worker FD`. The first message has the settings. What a
step emitted leaves in one frame; while the front does not read, events wait joined, a delta a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from outrider.serve.link.seam import EventStream
from outrider.serve.process.framing import Message, Wire
from outrider.serve.process.records import pack_error, pack_event, pack_info, unpack_request

log = logging.getLogger("outrider")
STATS_S = 0.5  # how often counts are told unasked: what a front still knows of an engine that died
DEVICE_LOST = 70  # the exit status after a device's fault
WARM_UP = (1, 2, 3)  # a prompt: what is compiled or measured at the first step is done before anybody waits for it


class Worker:
    """Changes state. Lives in one event loop; the engine has a thread of its own."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self.wire = Wire(self.hear, self._ended.set)
        self._link: Any = None
        self._keeps = False  # whether there is a file for what drafters learn
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: Mapping[str, Any] = {}

    async def run(self, channel: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self.wire, sock=channel)
        beat = asyncio.create_task(self._beat())
        await self._ended.wait()
        beat.cancel()
        if self._link is None:
            os._exit(0)  # it may be loading: nobody waits for that
        await self._link.close(0.0)  # the front has gone: what was learnt is worth keeping

    def hear(self, messages: list[Message]) -> None:
        for message in messages:
            kind, number, *rest = message
            answers: dict[str, Callable[..., Awaitable[Any]]] = {
                "load": self._load, "submit": self._submit, "cancel": self._cancel, "stats": self._stats,
                "slots": self._slots, "trace": self._trace, "recall": self._recall, "save": self._save,
                "close": self._close,
            }  # fmt: skip
            self._spawn(self._answer(number, answers[kind](*rest)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Awaitable[Any]) -> None:
        try:
            self.wire.say("reply", number, await work)
        except Exception as error:
            log.debug("the engine refused", exc_info=error)
            self.wire.say("refused", number, pack_error(error))

    async def _load(self, settings: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
        from outrider.api import load
        from outrider.serve.link.local import LocalLink

        link = LocalLink(lambda: load(**settings), lost=end_if_device_lost, **limits)
        await link.start()
        await link.between_steps(lambda: warm_up(link.outrider))
        self._link, self._keeps = link, settings.get("memory") is not None
        return pack_info(link.info)

    async def _submit(self, packed: Mapping[str, Any]) -> bool:
        request = unpack_request(packed)
        stream = await self._link.submit(request)
        self._spawn(self._pass_on(request.id, stream))
        return True

    async def _pass_on(self, id: str, stream: EventStream) -> None:
        """The name is the front's; tasks that wake in one round of the loop share a frame."""
        async for event in stream:
            self.wire.say("event", id, pack_event(event))
            await self.wire.room()

    async def _cancel(self, id: str) -> bool:
        return bool(await self._link.cancel(id))

    async def _stats(self) -> Mapping[str, Any]:
        return dict(await self._link.stats())

    async def _slots(self) -> list[Any]:
        return [dict(one) for one in await self._link.slots()]

    async def _trace(self, id: str) -> Mapping[str, Any] | None:
        found = await self._link.trace(id)
        return None if found is None else dict(found)

    async def _recall(self) -> bool:
        """What drafters learnt until the last save, by whichever engine."""
        if self._keeps:
            await self._link.between_steps(self._link.outrider.recall_memory)
        await self._link.recall_learnt()
        return self._keeps

    async def _save(self) -> bool:
        """Arrays are taken between two steps; the file is written beside them."""
        if self._link is None or not self._keeps:
            return False
        outrider = self._link.outrider
        arrays = await self._link.between_steps(outrider.collect_memory)
        await asyncio.to_thread(outrider.save_memory, None, arrays)
        return True

    async def _close(self, seconds: float) -> bool:
        """Keeps what drafters learnt, as `Outrider.close` does."""
        link, self._link = self._link, None
        if link is not None:
            await link.close(seconds)
        asyncio.get_running_loop().call_later(0.05, self._ended.set)  # the answer leaves first
        return True

    async def _beat(self) -> None:
        """Counts, where they have changed."""
        while True:
            await asyncio.sleep(STATS_S)
            if self._link is not None:
                with contextlib.suppress(Exception):
                    stats = await self._stats()
                    if stats != self._told:
                        self._told = stats
                        self.wire.say("stats", 0, stats)


def warm_up(outrider: Any) -> None:
    """A short text with the default method, and nothing of it kept."""
    from outrider.core.params import SamplingParams

    outrider.generate([list(WARM_UP)], SamplingParams(max_new_tokens=8, ignore_eos=True))


def end_if_device_lost() -> None:
    """After a fault: a device that refuses the simplest question is lost to this process, but not to the next one."""
    import torch

    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        log.error("the device is lost to this process, which ends: %s", error)
        os._exit(DEVICE_LOST)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's to handle
    channel = socket.socket(fileno=int(sys.argv[1]))
    logging.basicConfig(level=logging.WARNING, format="engine: %(message)s")
    asyncio.run(Worker().run(channel))
    os._exit(0)  # threads of runtimes may outlive their work


if __name__ == "__main__":
    main()
