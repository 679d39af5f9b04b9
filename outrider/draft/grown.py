"""Grown: a drafter made of a source (next-token laws) and a grower (the shape of the tree).

`sampled` draws candidates from the source's law, for a coupled verification rule; a greedy request never draws. `lone`
keeps the drafts of a single sequence on the calling thread, for use beside a target with threads of its own: torch's
would wait for those that still spin after their last work, and take their cores from them when the next step begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from outrider.protocols import Budget, Chunk, Context, Grower, Needs, Noise, Source, StepRecord
from outrider.tree import TokenTree


@dataclass(slots=True)
class Grown:
    source: Source
    grower: Grower
    sampled: bool = False
    shared_noise: bool = False
    lone: bool = False
    _contexts: dict[int, Context] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def needs(self) -> Needs:
        return self.source.needs

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        self._contexts[slot] = context
        self.source.begin(slot, context, chunks)

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)
        self.source.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[TokenTree]:
        contexts = [self._contexts[slot] for slot in slots]
        pending = [int(context.tokens[-1]) for context in contexts]
        own = [n if self.sampled and c.temperature > 0 else None for n, c in zip(noise, contexts, strict=True)]
        with _threads(1 if self.lone and len(slots) == 1 else torch.get_num_threads()):
            return self.grower.grow(self.source, slots, pending, budgets, own)

    def observe(self, slot: int, record: StepRecord) -> None:
        self.source.observe(slot, record)
        self.grower.observe(slot, record)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many of torch's on this thread; a fraction of a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
