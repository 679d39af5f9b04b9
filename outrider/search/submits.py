"""What a search asks of an engine: the loop of requests, whichever object holds it, and samples that may end early."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.core.engine import Handle
from outrider.core.errors import EmptySupport
from outrider.core.generation import Generation
from outrider.core.params import SamplingParams
from outrider.core.protocols import Constraints

Dead = tuple[int, ...]


class Submits(Protocol):
    """An engine, or what wraps one: requests go in, and are stepped together."""

    def submit(self, prompt: Any, params: SamplingParams, *, constraint: Constraints | None = None) -> Handle: ...
    def step(self) -> bool: ...


def settled(engine: Submits, handle: Handle) -> tuple[list[Generation], list[Dead]]:
    """Steps the engine until all samples have ended: those that did well, and the outputs that nothing could follow.

    Any other error of a sample is raised. An interrupt cancels what is left.
    """
    try:
        while not handle.done:
            engine.step()
    finally:
        handle.cancel()
    dead = []
    for s in handle.sequences:
        if s.error is not None and not isinstance(s.error, EmptySupport):
            raise s.error
        if isinstance(s.error, EmptySupport):
            dead.append(s.error.output)
    return [s.generation() for s in handle.sequences if s.error is None], dead
