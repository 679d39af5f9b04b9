"""What all routes share: reading a form, sending requests to the engine, and following them until their ends.

Decides nothing about tokens. A client that leaves frees its sequences before the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from outrider.core.errors import ClosedEngine, InputError
from outrider.serve.errors import ApiError
from outrider.serve.forms.base import Form, read_json
from outrider.serve.forms.sampling import Sampling
from outrider.serve.link.seam import Event, EventStream, Request
from outrider.serve.metrics.observed import Observed
from outrider.serve.settings import Settings
from outrider.serve.text import Text

AnyForm = TypeVar("AnyForm", bound=Form)
Result = TypeVar("Result")
UNKNOWN_HEADER = "x-outrider-ignored"


class ClientGone(Exception):
    """The client left before its answer was there."""


@dataclass(slots=True)
class Front:
    """One server's state besides its engine: settings, text, and what was asked so far."""

    link: Observed
    text: Text
    settings: Settings
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    open_runs: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def names(self) -> tuple[str, ...]:
        return self.settings.names or (self.text.name,)

    async def read(self, http: HttpRequest, form: type[AnyForm]) -> tuple[AnyForm, dict[str, str]]:
        """The form of a request, and the headers of its answer: they name the fields that nobody knows."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, "the body must be JSON; send it with 'Content-Type: application/json'")
        given = read_json(await http.body())
        made, left_out = form.read(given, self.settings.unknown)
        if model := given.get("model"):
            self.check_model(str(model))
        shown = ",".join(name for name in left_out[:20] if name.isascii() and name.isprintable())[:500]
        return made, {UNKNOWN_HEADER: shown} if shown else {}

    def check_model(self, name: str) -> None:
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"no model {name[:100]!r}; this server has {known}", param="model",
                           code="model_not_found")  # fmt: skip

    def requests(
        self, form: Sampling, prompts: Sequence[Sequence[int]], http: HttpRequest, *, default_new: int | None = None,
        form_of_text: Mapping[str, Any] | None = None, show_special: bool = False,
    ) -> list[Request]:  # fmt: skip
        """What the engine is asked, one request a prompt."""
        info, settings = self.link.info, self.settings
        texts = (form.n or 1) * len(prompts)
        if texts > settings.max_samples:
            raise InputError(f"{texts} texts are asked for; at most {settings.max_samples} in one request")
        made = []
        base = form.request_id or http.state.request_id
        for place, prompt in enumerate(prompts):
            most = settings.max_prompt_tokens
            if most is not None and len(prompt) > most:
                raise InputError(f"the prompt has {len(prompt)} tokens; at most {most} are taken here")
            params = form.params(
                self.text, len(prompt), info.max_context, settings.defaults, default_new=default_new,
                most_new=settings.max_new_tokens,
            )  # fmt: skip
            if show_special or form_of_text:
                params = params.with_(skip_special=not show_special and params.skip_special, **(form_of_text or {}))
            made.append(
                Request(
                    f"{base}-{place}" if len(prompts) > 1 else base, tuple(prompt), params, form.method,
                    priority=form.priority or 0, caller=http.state.caller, salt=form.cache_salt or "",
                    trace=bool(form.outrider and form.outrider.trace),
                )
            )  # fmt: skip
        return made

    async def run(self, requests: Sequence[Request]) -> Run:
        """Queued when this returns; refused together if one is."""
        if self.draining:
            raise ClosedEngine("the server is about to end; ask again when it is back")
        run = Run(self, requests)
        try:
            for request in requests:
                run.streams.append(await self.link.submit(request))
        except BaseException:
            await run.aclose()
            raise
        return run


class Run:
    """The events of the requests of one HTTP request, with the place of each. Changes state; close it in any case."""

    def __init__(self, front: Front, requests: Sequence[Request]) -> None:
        self.front, self.requests = front, requests
        self.streams: list[EventStream] = []
        self._closed = False
        front.open_runs += 1

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        if len(self.streams) == 1:
            async for event in self.streams[0]:
                yield 0, event
            return
        waiting: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()

        async def follow(place: int, stream: EventStream) -> None:
            try:
                async for event in stream:
                    waiting.put_nowait((place, event))
                waiting.put_nowait(None)
            except Exception as error:
                waiting.put_nowait(error)

        tasks = [asyncio.create_task(follow(place, stream)) for place, stream in enumerate(self.streams)]
        try:
            left = len(tasks)
            while left:
                item = await waiting.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.front.open_runs -= 1
        for stream in self.streams:
            await stream.aclose()


async def unless_gone(http: HttpRequest, seconds: float, job: Coroutine[Any, Any, Result]) -> Result:
    """The job's result; it is given up when the client leaves, or has waited long enough."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(job), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGone
        raise ApiError(408, f"the answer was not there after {seconds:g} s; ask for less", code="timeout")
    finally:
        for one in (task, gone):
            one.cancel()
        with suppress(BaseException):
            await asyncio.gather(task, gone, return_exceptions=True)
