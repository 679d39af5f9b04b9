"""Engine processes: started, told what to load, asked questions, and known to be dead when they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import ClosedEngine
from outrider.serve.link.seam import Info
from outrider.serve.process.framing import Message, Wire
from outrider.serve.process.records import unpack_error, unpack_info

log = logging.getLogger("outrider")
COMMAND = (sys.executable, "-m", "outrider.serve.process.worker")
END_S = 15.0  # that a process may take to end after it was told to
SIGKILL = 9
REAPED_S = 0.2  # between a process's last word and its exit status


class EngineProcess:
    """One process and the socket to it. From one event loop; ends with `kill` or by itself, and says so once."""

    def __init__(self, hear: Callable[[EngineProcess, Message], None], lost: Callable[[EngineProcess], None]) -> None:
        self._on_event, self._on_lost = hear, lost
        self._wire = Wire(self._hear, self._lost)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.info: Info | None = None  # known once it has loaded
        self.stats: Mapping[str, Any] = {}  # the last ones it told
        self.dead = False
        self.killed_from_outside = False  # nothing that it was asked has to do with its death
        self._out_of_memory = _out_of_memory()  # kills so far

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, settings: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
        """Returns when the model is loaded and a step has run; raises what loading it raised."""
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [*COMMAND, str(there.fileno())], pass_fds=[there.fileno()], stdin=subprocess.DEVNULL,
                stdout=2, start_new_session=True,  # what is printed there is no answer; Ctrl-C is the front's
            )  # fmt: skip
        await asyncio.get_running_loop().create_connection(lambda: self._wire, sock=here)
        self.info = unpack_info(await self.ask("load", dict(settings), dict(limits)))

    async def ask(self, kind: str, *args: Any) -> Any:
        """The answer, or the error that it raised there; `ClosedEngine` where the process ends before it answers."""
        if self.dead:
            raise ClosedEngine("the engine's process has ended")
        self._number += 1
        number = self._number
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self._wire.say(kind, number, *args)
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def tell(self, kind: str, *args: Any) -> None:
        """The same where nobody waits for the answer."""
        self._wire.say(kind, 0, *args)

    def kill(self) -> None:
        """At once: nothing that it knows is needed."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._wire.close()

    async def end(self, seconds: float) -> None:
        """Lets it finish for so long, keeps what drafters learnt, and waits until it is gone."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self.ask("close", seconds), seconds + END_S)
            await asyncio.wait_for(asyncio.to_thread(self._process.wait, END_S), END_S)
        except (TimeoutError, subprocess.TimeoutExpired, ClosedEngine):
            pass
        self.kill()
        await asyncio.to_thread(self._process.wait)

    def _hear(self, messages: list[Message]) -> None:
        for message in messages:
            kind, number, *rest = message
            if kind == "reply":
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_result(rest[0])
            elif kind == "refused":
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_exception(unpack_error(rest[0]))
            elif kind == "stats":
                self.stats = rest[0]
            else:
                self._on_event(self, message)

    def _lost(self) -> None:
        """The socket closed: the process has died, or is about to."""
        self.dead = True
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(REAPED_S)
                self.killed_from_outside = status == -SIGKILL and _out_of_memory() == self._out_of_memory
            if self._process.poll() is None:
                self._process.kill()  # one that does not listen any more is of no use
            asyncio.get_running_loop().run_in_executor(None, self._process.wait)  # no zombie stays
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ClosedEngine("the engine's process has ended"))
        self._on_lost(self)


def _out_of_memory() -> float:
    """How often this system has killed a process for want of memory; unlike anything where it does not say."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())["oom_kill"])
    return math.nan
