"""Grown: a drafter made of a source (next-token laws) and a grower (the shape of the tree).

`sampled` draws candidates from the source's law, for a coupled verification rule; a greedy request never draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.protocols import Budget, Chunk, Context, Grower, Needs, Noise, Source, StepRecord
from outrider.tree import TokenTree


@dataclass(slots=True)
class Grown:
    source: Source
    grower: Grower
    sampled: bool = False
    shared_noise: bool = False
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
        return self.grower.grow(self.source, slots, pending, budgets, own)

    def observe(self, slot: int, record: StepRecord) -> None:
        self.source.observe(slot, record)
        self.grower.observe(slot, record)
