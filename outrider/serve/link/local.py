"""An engine in this process, stepped by a thread: for tests, small machines and the engine's end of a socket.

Requests go in and are cancelled from the event loop; what a step emitted comes back to it in one call. Nothing is
decided here: order, fairness and priorities are the engine's schedule.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider import methods
from outrider.api import Outrider
from outrider.core.engine import Engine
from outrider.core.errors import ClosedEngine, InputError, OutriderError
from outrider.core.generation import FinishReason, Generation
from outrider.core.protocols import Recipe
from outrider.core.schedule import Delivery, Handle, Terms
from outrider.core.text import token_decoder
from outrider.serve.link.counts import Counts
from outrider.serve.link.fleet import Fleet
from outrider.serve.link.prediction import agreed
from outrider.serve.link.seam import Delta, End, Event, EventStream, Info, PromptReport, Request
from outrider.serve.link.stream import JoinedEvents
from outrider.serve.link.traces import Traces
from outrider.store import store

if TYPE_CHECKING:
    from outrider.serve.link.learning import Learning

NEEDLESS = ("nothing", "a prediction")  # what methods may need that any request can ask for
POLL_S = 0.02
JOBS_S = 0.05  # how long an idle engine may take to see that there is a job
log = logging.getLogger("outrider")
Result = TypeVar("Result")
Active = tuple[Request, Handle, JoinedEvents, str]
News = tuple[JoinedEvents, str, Event]


class LocalLink:
    """`EngineLink` over an engine of this process. `load` runs in a thread, so that the loop stays free.

    `lost` is called after a fault, before anybody is told of it: it may end the process.
    """

    def __init__(
        self, load: Callable[[], Outrider], max_waiting: int | None = None, traces: int = 64,
        lost: Callable[[], object] | None = None, max_gap_ms: float | None = None, learn: str | None = None,
    ) -> None:  # fmt: skip
        """`learn`: a folder in which the drafter keeps what it learns from what it serves; None: it does not learn."""
        self._load, self._max_waiting, self._most_traces, self._lost = load, max_waiting, traces, lost
        self._max_gap_ms, self._learn = max_gap_ms, learn
        self._learning: Learning | None = None
        self._active: dict[str, Active] = {}
        self._traces: Traces | None = None  # without a tokenizer there are no texts to show
        self._counts = Counts()
        self._asked: dict[str, float] = {"requests": 0, "prompt_tokens": 0}
        self._news: list[News] = []  # of this step
        self._info: Info | None = None
        self._outrider: Outrider | None = None
        self._recipes: dict[str, Recipe] = {}
        self._closing = False
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        made = await asyncio.to_thread(self._load)
        if self._max_waiting is not None:
            made.engine.max_queue = self._max_waiting
        if self._max_gap_ms is not None:
            made.engine.pace.max_gap_s = self._max_gap_ms / 1e3
        if self._learn is not None:
            from outrider.serve.link.learning import Learning  # loads what trains: only where it is wanted

            self._learning = await asyncio.to_thread(Learning, made, Path(self._learn))
        self._outrider, self._info = made, describe(made)
        self._recipes = {made.method: made.recipe()}
        costs = self._recipes[made.method].costs
        self._counts, self._fleet = Counts(costs), Fleet(costs)
        made.engine.watch(self._counts.step)
        made.engine.watch(self._fleet.watch)
        if made.loaded.tokenizer is not None:
            self._traces = Traces(token_decoder(made.loaded.tokenizer), made.loaded.name, self._most_traces)
        self._thread = threading.Thread(target=self._work, args=(made.engine,), name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> Info:
        assert self._info is not None, "start the engine first"
        return self._info

    @property
    def ready(self) -> bool:
        return self._info is not None and not self._closing

    @property
    def outrider(self) -> Outrider:
        """The engine itself, for what only a front in the same process may use."""
        assert self._outrider is not None, "start the engine first"
        return self._outrider

    async def submit(self, request: Request) -> EventStream:
        if self._closing:
            raise ClosedEngine("the engine takes no more requests; ask again when it is back")
        if request.id in self._active:
            raise InputError(f"request_id {request.id[:100]!r} is in use; give each request its own")
        recipe = await self._recipe(request.method)
        params = request.params.with_(trace=True) if request.trace else request.params
        terms = Terms(request.priority, request.caller, request.salt, request.resume, request.sample)
        stream = JoinedEvents(params.n, partial(self._drop, request.id))
        submit = partial(
            self.outrider.engine.submit, list(request.prompt), params, recipe, terms=terms,
            listener=partial(self._hear, request, _resumed(request, recipe, self.info), stream),
        )  # fmt: skip
        handle = await asyncio.to_thread(submit) if params.constrained else submit()  # compiling may take a while
        if stream.ended:
            return stream
        self._active[request.id] = (request, handle, stream, recipe.name)
        self._asked["requests"] += 1
        self._asked["prompt_tokens"] += len(request.prompt)
        if request.deadline_s is not None:
            self._loop.call_later(request.deadline_s, self._cancel, request.id)
        return stream

    async def cancel(self, id: str) -> bool:
        return self._cancel(id)

    async def stats(self) -> Mapping[str, Any]:
        engine = self.outrider.engine
        now = {"running": len(engine.running), "waiting": len(engine.queue), "fleet": self._fleet.as_dict()}
        learnt = {} if self._learning is None else self._learning.figures()
        return {**self._asked, **self._counts.told(), **learnt, **now}

    async def slots(self) -> list[Mapping[str, Any]]:
        now = time.perf_counter()
        return [
            {
                "id": request.id, "sample": s.sample, "slot": s.slot, "running": s.slot >= 0, "method": method,
                "prompt_tokens": len(s.prompt), "new_tokens": s.history.generated,
                "cached_tokens": s.stats.cached_tokens, "max_new_tokens": s.params.max_new_tokens,
                "seconds": now - s.submitted,
            }
            for request, handle, _, method in self._active.values()
            for s in handle.sequences
            if not s.left
        ]  # fmt: skip

    async def trace(self, id: str) -> Mapping[str, Any] | None:
        return None if self._traces is None else await asyncio.to_thread(self._traces.find, id)

    async def between_steps(self, job: Callable[[], Result]) -> Result:
        """What must not meet a step, such as building a method, which may run the target."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.append(run)
        return await asyncio.wrap_future(future)

    async def recall_learnt(self) -> None:
        """The drafter goes on from what was kept last, by whichever engine."""
        if self._learning is not None:
            await self.between_steps(self._learning.resume)

    async def close(self, seconds: float = 0.0) -> None:
        self._closing = True
        if self._outrider is None:
            return
        limit = time.monotonic() + seconds
        while self._active and time.monotonic() < limit:
            await asyncio.sleep(POLL_S)
        if not self._outrider.engine.closed:
            await asyncio.to_thread(self._outrider.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._learning is not None:
            await asyncio.to_thread(self._learning.close)
        self._flush()  # what closing brought

    # -- in the event loop

    def _cancel(self, id: str) -> bool:
        active = self._active.get(id)
        if active is not None:
            active[1].cancel()
        return active is not None

    def _drop(self, id: str) -> None:
        self._cancel(id)

    async def _recipe(self, method: str | None) -> Recipe:
        name = method or self.info.method
        if name not in self._recipes:
            methods.check(name)
            if name not in self.info.methods:
                known = ", ".join(self.info.methods)
                raise InputError(f"method {name!r} needs more than this server has; use one of {known}")
            build = partial(self.outrider.recipe, name)
            self._recipes[name] = await self.between_steps(build)
        return self._recipes[name]

    def _pass_on(self, news: Sequence[News]) -> None:
        for stream, id, event in news:
            stream.put([event])
            if stream.ended:
                self._active.pop(id, None)

    # -- in the engine's thread

    def _work(self, engine: Engine) -> None:
        while not engine.closed:
            while self._jobs:
                self._jobs.popleft()()
            try:
                if engine.wait_for_work(JOBS_S):
                    engine.step()
            except ClosedEngine:
                break
            except Exception as error:  # everybody was told; those who come next find the engine at work
                log.error("a step failed and ended all requests: %r", error, exc_info=error)
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Everything that the last step brought, in one call to the loop."""
        news, self._news = self._news, []
        if self._lost is not None and any(isinstance(event, End) and event.error for _, _, event in news):
            self._lost()
        if news:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                self._loop.call_soon_threadsafe(self._pass_on, news)

    def _hear(self, request: Request, resumed: str, stream: JoinedEvents, delivery: Delivery) -> None:
        if delivery.token_ids:
            logprobs = delivery.logprobs if request.params.logprobs is not None else None
            delta = Delta(delivery.sample, delivery.token_ids, delivery.text, delivery.origins, logprobs)
            self._news.append((stream, request.id, delta))
        if delivery.generation is not None:
            held = "" if delivery.token_ids else delivery.text
            end = _end(request, resumed, delivery.generation, held, delivery.error)
            if delivery.generation.prompt_logprobs is not None:
                report = PromptReport(tuple(delivery.generation.prompt_logprobs))
                self._news.append((stream, request.id, report))
            self._counts.ended(delivery.generation)
            if self._traces is not None:
                self._traces.keep(request.id, delivery.generation, request.params)
            self._news.append((stream, request.id, end))


def describe(made: Outrider) -> Info:
    traits = made.target.traits
    able = {made.method, *(one.name for one in methods.table() if one.needs in NEEDLESS)}
    return Info(
        model=made.loaded.name, method=made.method, methods=tuple(sorted(able)), vocab_size=made.target.vocab_size,
        max_context=made.target.max_context, slots=traits.slots, eos_ids=tuple(sorted(made.loaded.eos_ids)),
        runtime=traits.runtime, precision=traits.precision or str(made.loaded.model.dtype).removeprefix("torch."),
        device=str(made.target.device), fingerprint=made.loaded.fingerprint, same_bits=traits.same_bits,
        corpora=_corpora(made.recipe()),
    )  # fmt: skip


def _corpora(recipe: Recipe) -> tuple[Mapping[str, Any], ...]:
    """The store that the default method drafts from, without its place on disk."""
    folder = getattr(recipe.options, "store", "")
    if not folder:
        return ()
    said = store.describe(store.open_store(folder))
    return ({"name": Path(folder).name, **{name: said[name] for name in ("tokens", "documents", "bytes", "finished")}},)


def _resumed(request: Request, recipe: Recipe, info: Info) -> str:
    """How the text that goes on compares with one that was never interrupted."""
    if not request.resume:
        return ""
    if recipe.verifier.coupled and not request.params.greedy:
        return "new draw"
    return "same text" if info.same_bits else "near ties"


def _end(request: Request, resumed: str, done: Generation, held: str, error: Exception | None) -> End:
    finish = done.finish_reason
    if error is not None:
        finish = FinishReason.ERROR
    told = "" if error is None else str(error) if isinstance(error, OutriderError) else f"the engine failed: {error!r}"
    return End(
        done.sample, finish, held, done.stop, done.seed, done.stats.as_dict(),
        agreed(request.params.prediction, done.token_ids), done.stats.cached_tokens, told, resumed,
    )  # fmt: skip
