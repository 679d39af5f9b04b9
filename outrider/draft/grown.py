"""Grown: a drafter made of a source (next-token distributions) and a grower (the shape of the tree).

`sampled` draws candidates from the source's distribution, for a coupled verification rule; a greedy request never
draws. `beside` a target whose threads are not torch's it stays on the calling thread: torch's threads would wait for
those that still spin after their last work, and take their cores from them when the next step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from numpy.typing import NDArray

from outrider.core.numeric.torch_threads import torch_threads
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Grower, Noise, Remembers, Source, WholeSource
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import QRow, TokenTree


@dataclass(slots=True)
class Grown:
    source: Source
    grower: Grower
    sampled: bool = False
    shared_noise: bool = False
    beside: bool = False
    _contexts: dict[int, Context] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def needs(self) -> Needs:
        return self.source.needs

    def begin(self, slot: int, context: Context) -> None:
        self._contexts[slot] = context
        with self._threads():
            self.source.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        with self._threads():
            self.source.absorb(chunks)

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)
        self.source.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        contexts = [self._contexts[slot] for slot in slots]
        pending = [int(context.tokens[-1]) for context in contexts]
        drawn = [n if self.sampled and c.temperature > 0 else None for n, c in zip(noise, contexts, strict=True)]
        with self._threads():
            whole = getattr(self.source, "marginals", None) is not None
            counted = _CountedWhole(self.source) if whole else _Counted(self.source)
            return Proposals(self.grower.grow(cast(Source, counted), slots, pending, budgets, drawn), counted.levels)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        with self._threads():
            self.source.observe(slots, records)
        self.grower.observe(slots, records)

    def _threads(self) -> AbstractContextManager[None]:
        return torch_threads(1) if self.beside else nullcontext()


@dataclass(slots=True)
class Remembering(Grown):
    """Grown by a rule that goes on from what earlier runs have shown."""

    kept: Remembers | None = None

    def memory(self) -> dict[str, NDArray[Any]]:
        return {} if self.kept is None else self.kept.memory()

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if self.kept is not None:
            self.kept.remember(arrays)

    def forget(self) -> None:
        if self.kept is not None:
            self.kept.forget()


@dataclass(slots=True)
class _Counted:
    """A source that counts how many times in a row it was asked: the levels of the tree that it ran."""

    source: Source
    levels: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        self.levels += 1
        return self.source.start(slots)

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        self.levels += 1
        return self.source.extend(slots, trees, done)


class _CountedWhole(_Counted):
    """One with the hint to growers, which passes through this."""

    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]:
        self.levels += 1
        return cast(WholeSource, self.source).marginals(slots)
