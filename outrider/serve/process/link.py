"""The front's end: an `EngineLink` whose engine may die at any moment and is started again, while streams go on.

What a request said so far is kept here, token by token. When the engine's process ends, another one is started (or the
spare one taken), and every sample that has not ended is asked for again from its tokens and its seed; what comes then
is passed on in the same stream. Each end says whether that is the text of an unbroken run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ClosedEngine, FullQueue, InputError, OutriderError
from outrider.core.generation import FinishReason
from outrider.serve.link.seam import EventStream, Info, Request
from outrider.serve.process.active import Active
from outrider.serve.process.counts import joined
from outrider.serve.process.engines import EngineProcess
from outrider.serve.process.framing import Message
from outrider.serve.process.records import pack_request, unpack_event

log = logging.getLogger("outrider")
SAVE_S = 60.0
FAILED_STARTS = 3  # one after the other, then there is something to mend
SUSPECT, FRUITLESS = 2, 5  # engines that a request sees die without a token of it until it is tried apart, and ended
TRIAL_S, FULL_S = 0.005, 0.05  # between looks
NO_TOKEN = f"the engine died {FRUITLESS} times without a token of this request"
PAUSE_S, RELOAD_S = 0.5, 5.0  # after a failed start; before another spare is loaded, while texts need the cores


class ProcessLink:
    """`EngineLink` over an engine in another process. `load` is what `outrider.load` takes, and `limits` what its
    `LocalLink` takes, as JSON values.

    With `spare` a second process stands by with the model loaded. A `memory` among the settings is saved every `save_s`
    seconds and at the end.
    """

    def __init__(
        self, load: Mapping[str, Any], *, limits: Mapping[str, Any] | None = None, spare: bool = False,
        save_s: float = SAVE_S,
    ) -> None:  # fmt: skip
        self._settings, self._limits = dict(load), dict(limits or {})
        self._with_spare, self._save_s = spare, save_s
        self._engine: EngineProcess | None = None
        self._spare: EngineProcess | None = None
        self._active: dict[str, Active] = {}
        self._names: dict[str, Active] = {}
        self._up = asyncio.Event()
        self._info: Info | None = None
        self._closing = False
        self._broken: Exception | None = None
        self._before: dict[str, Any] = {}  # counts of engines that are no more
        self._tasks: set[asyncio.Task[None]] = set()
        self._trial = asyncio.Lock()
        self.restarts = 0

    async def start(self) -> None:
        await self._install(await self._loaded())
        if self._with_spare:
            self._spawn(self._make_spare())
        if self._settings.get("memory") is not None:
            self._spawn(self._save_now_and_then())

    @property
    def info(self) -> Info:
        assert self._info is not None, "start the engine first"
        return self._info

    @property
    def ready(self) -> bool:
        return self._up.is_set() and not self._closing

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        assert self._engine is not None, "start the engine first"
        return self._engine.pid

    @property
    def spare_ready(self) -> bool:
        return self._spare is not None and self._spare.info is not None and not self._spare.dead

    async def submit(self, request: Request) -> EventStream:
        if request.id in self._active:
            raise InputError(f"request_id {request.id!r} is in use; give each request its own")
        active = Active.of(request, self._left)
        self._active[request.id] = active
        try:
            while not active.taken and active.left():
                if active.fruitless >= FRUITLESS:
                    raise ClosedEngine(NO_TOKEN)
                engine = await self._running()
                with contextlib.suppress(Died):
                    await self._try(engine, active)
                    active.taken = True
        except BaseException:
            self._forget(active)
            raise
        return active.stream

    async def cancel(self, id: str) -> bool:
        active = self._active.get(id)
        if active is None:
            return False
        self._cancel(active)
        return True

    async def stats(self) -> Mapping[str, Any]:
        engine = self._engine
        told: Mapping[str, Any] = {}
        if engine is not None and not engine.dead:
            with contextlib.suppress(OutriderError):
                engine.stats = told = await engine.ask("stats")
        apart = {"restarts": self.restarts, "spare": int(self.spare_ready)}
        return {"running": 0, "waiting": 0, **joined(self._before, told), **apart}

    async def slots(self) -> list[Mapping[str, Any]]:
        return list(await self._question([], "slots"))

    async def trace(self, id: str) -> Mapping[str, Any] | None:
        """Of a request that saw its engine die: what the last engine did for it."""
        active = self._active.get(id)
        for name in active.names if active is not None else [id]:
            if (found := await self._question(None, "trace", name)) is not None:
                return {**found, "id": id}
        return None

    async def close(self, seconds: float = 0.0) -> None:
        self._closing = True
        for task in tuple(self._tasks):
            task.cancel()
        if self._spare is not None:
            self._spare.kill()
        if self._engine is not None and not self._engine.dead:
            await self._engine.end(seconds)
        self._end_all(FinishReason.CANCELLED, "")

    # -- engines come and go

    async def _loaded(self) -> EngineProcess:
        engine = EngineProcess(self._hear, self._lost)
        try:
            await engine.start(self._settings, self._limits)
        except BaseException:
            engine.kill()
            raise
        return engine

    async def _install(self, engine: EngineProcess) -> None:
        self._engine, self._info = engine, engine.info
        for active in self._active.values():
            active.names.clear()
        self._names.clear()
        self._up.set()

    async def _running(self) -> EngineProcess:
        await self._up.wait()
        if self._closing or self._broken is not None:
            raise ClosedEngine(f"the engine cannot be started: {self._broken or 'the server is closing'}")
        assert self._engine is not None
        return self._engine

    def _lost(self, engine: EngineProcess) -> None:
        if engine is self._spare:
            self._spare = None
            if not self._closing:
                log.warning("the spare engine (process %d) died; another one is loaded", engine.pid)
                self._spawn(self._make_spare(PAUSE_S))
        if engine is not self._engine or self._closing:
            return
        log.warning("the engine (process %d) died with %d requests; it is started again", engine.pid, len(self._active))
        self._up.clear()
        self._blame(engine)
        self._before = joined(self._before, engine.stats, gauges=False)
        self.restarts += 1
        self._spawn(self._revive())

    async def _revive(self) -> None:
        for failed in range(FAILED_STARTS):
            try:
                engine = await self._next_engine()
                if engine.dead:  # before anybody counted on it
                    raise OutriderError("it died as soon as it was loaded")
            except Exception as error:
                log.error("the engine could not be started: %s", error)
                self._broken = error
                await asyncio.sleep(PAUSE_S * 2**failed)
                continue
            self._broken = None
            await self._install(engine)
            await asyncio.gather(*(self._go_on(engine, active) for active in list(self._active.values())))
            return
        self._end_all(FinishReason.ERROR, f"the engine died and could not be started again: {self._broken}")
        self._up.set()  # whoever waits is told so

    async def _next_engine(self) -> EngineProcess:
        engine, self._spare = self._spare, None
        if engine is not None and engine.info is not None and not engine.dead:
            if self._settings.get("memory") is not None or self._limits.get("learn") is not None:
                with contextlib.suppress(OutriderError):
                    await engine.ask("recall")
            self._spawn(self._make_spare(RELOAD_S))
            return engine
        if engine is not None:  # it was being loaded: two at once would take twice as long
            self._spare = engine
            while self._spare is engine and engine.info is None:
                await asyncio.sleep(0.01)
            return await self._next_engine()
        return await self._loaded()

    async def _make_spare(self, pause: float = 0.0) -> None:
        await asyncio.sleep(pause)
        engine = self._spare = EngineProcess(self._hear, self._lost)
        try:
            await engine.start(self._settings, self._limits)
        except OutriderError as error:
            log.warning("no spare engine: %s", error)
            if self._spare is engine:
                self._spare = None
            engine.kill()

    async def _go_on(self, engine: EngineProcess, active: Active) -> None:
        if not active.taken:
            return  # whoever submits it tries again
        if active.fruitless >= FRUITLESS:
            self._end(active, FinishReason.ERROR, NO_TOKEN)
            return
        try:
            while True:
                try:
                    await self._try(engine, active)
                    return
                except FullQueue:  # what was taken once is not refused later: all come at once, and some wait here
                    await asyncio.sleep(FULL_S)
        except Died:
            return  # the next engine is asked
        except OutriderError as error:
            self._end(active, FinishReason.ERROR, str(error))

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._save_s)
            try:
                await self._question(None, "save")
            except OutriderError as error:
                log.warning("what the drafters learnt was not saved: %s", error)

    # -- requests

    async def _try(self, engine: EngineProcess, active: Active) -> None:
        """One that saw engines die without a token may be why: such are tried one at a time, beside those that run."""
        if active.fruitless < SUSPECT:
            await self._ask_for(engine, active)
            return
        async with self._trial:
            active.on_trial = True
            try:
                if not engine.dead:
                    await self._ask_for(engine, active)
                while not engine.dead and active.left() and not active.progress:
                    await asyncio.sleep(TRIAL_S)
            finally:
                active.on_trial = False
        if engine.dead and not active.taken:
            raise Died

    def _blame(self, engine: EngineProcess) -> None:
        """An engine has died: who has nothing of it, or the one that was on trial, may have killed it.

        A signal from outside is nobody's fault: many of them, one soon after the other, end no request.
        """
        trials = [active for active in self._active.values() if active.on_trial]
        for active in trials or [one for one in self._active.values() if one.names]:
            without = not active.progress and (active.on_trial or active.fruitless < SUSPECT)
            if without and not engine.killed_from_outside:
                active.fruitless += 1
        for active in self._active.values():
            active.progress = False

    async def _ask_for(self, engine: EngineProcess, active: Active) -> None:
        requests = active.again()
        for request in requests:
            active.names.append(request.id)
            self._names[request.id] = active
        for request in requests:
            try:
                await engine.ask("submit", pack_request(request))
            except ClosedEngine as error:
                if engine.dead:
                    raise Died from error
                raise

    async def _question(self, otherwise: Any, kind: str, *args: Any) -> Any:
        engine = self._engine
        if engine is None or engine.dead:
            return otherwise
        try:
            return await engine.ask(kind, *args)
        except ClosedEngine:
            return otherwise

    def _hear(self, engine: EngineProcess, message: Message) -> None:
        _, name, packed = message
        active = self._names.get(name)
        if active is None or engine is not self._engine:
            return
        event = unpack_event(packed)
        active.hear(event)
        if not active.left():
            self._forget(active)
        active.stream.put([event])

    def _left(self, id: str) -> None:
        """Whoever read it does not any more."""
        if (active := self._active.get(id)) is not None:
            self._cancel(active)

    def _cancel(self, active: Active) -> None:
        if self.ready and active.taken and self._engine is not None:
            for name in active.names:
                self._engine.tell("cancel", name)
        else:
            self._end(active, FinishReason.CANCELLED, "")

    def _forget(self, active: Active) -> None:
        self._active.pop(active.request.id, None)
        for name in active.names:
            self._names.pop(name, None)

    def _end(self, active: Active, finish: FinishReason, error: str) -> None:
        """Without an engine that could."""
        ends = active.ends(finish, error)
        self._forget(active)
        active.stream.put(ends)

    def _end_all(self, finish: FinishReason, error: str) -> None:
        for active in list(self._active.values()):
            self._end(active, finish, error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Died(Exception):
    """Before it answered."""
