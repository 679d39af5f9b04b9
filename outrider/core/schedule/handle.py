"""What goes between an engine and whoever asks it: the terms of a request, its handle, what a step brought it.

All of it may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.core.generation import Delivery, Generation, Listener
from outrider.core.records import StepRecord, StepTiming

if TYPE_CHECKING:
    from outrider.core.sequence import Running

__all__ = ["Delivery", "Handle", "Listener", "StepReport", "Terms", "Watcher"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is served; nothing of it changes what is said."""

    priority: int = 0  # lower ones first, as in vLLM; waiting lowers it
    caller: str = ""  # callers share fairly
    cache_salt: str = ""  # prefixes are shared only between requests with the same salt
    resume_from: Sequence[int] | Generation = ()  # tokens said already: the text goes on behind them
    sample: int = 0  # number of the first sample: a part of the key of its noise


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step of an engine was."""

    number: int  # counts from 1
    timing: StepTiming
    sequences: int  # with a tree in the pass
    prompt_rows: int  # rows of prompts that ran in it
    candidates: int
    accepted: int  # candidates that became text
    emitted: int  # tokens that became text
    running: int  # sequences that hold a slot after it
    waiting: int
    preempted: int = 0  # sequences that were put back to wait

    @classmethod
    def of(
        cls, number: int, timing: StepTiming, records: Iterable[StepRecord], running: int, waiting: int,
        preempted: int = 0,
    ) -> StepReport:  # fmt: skip
        accepted = emitted = 0
        for record in records:
            emitted += len(record.emitted)
            accepted += min(len(record.verdict.path), len(record.emitted))
        candidates = timing.rows - timing.batch
        return cls(
            number, timing, timing.batch, timing.prompt_rows, candidates, accepted, emitted, running, waiting, preempted
        )


Watcher = Callable[[StepReport], None]


class Engines(Protocol):
    """What a handle asks of its engine."""

    def drive(self, reached: Callable[[], bool]) -> None: ...
    def wake(self) -> None: ...


class Handle:
    """A submitted request. `cancel` takes effect before the next step."""

    def __init__(self, engine: Engines, number: int, sequences: list[Running]) -> None:
        self.engine, self.id, self.sequences = engine, number, sequences

    @property
    def done(self) -> bool:
        return all(s.left for s in self.sequences)

    @property
    def ready(self) -> bool:
        """Whether there is new text of the first sample, or an end."""
        self.sequences[0].read()
        return self.done or bool(self.sequences[0].pieces)

    def cancel(self) -> None:
        for s in self.sequences:
            s.cancelled = True
        self.engine.wake()

    def results(self) -> list[Generation]:
        """One generation a sample; steps the engine, or waits for who steps it, until they are there."""
        self.engine.drive(lambda: self.done)
        for s in self.sequences:
            if s.error is not None:
                raise s.error
        return [s.generation() for s in self.sequences]

    def result(self) -> Generation:
        return self.results()[0]

    def partial(self) -> list[Generation]:
        """What has been emitted so far, without running anything."""
        return [s.generation() for s in self.sequences]

    def new_text(self) -> str:
        """Text of the first sample that has become safe since the last call, without running anything."""
        self.sequences[0].read()
        pieces, out = self.sequences[0].pieces, []
        while pieces:
            out.append(pieces.popleft())
        return "".join(out)

    def pieces(self) -> Generator[str]:
        """Text of the first sample as it comes; stopping early cancels the request."""
        try:
            while True:
                if piece := self.new_text():
                    yield piece
                elif self.done:
                    self.results()  # raises what ended the request, if it was an error
                    return
                else:
                    self.engine.drive(lambda: self.ready)
        finally:
            self.cancel()
