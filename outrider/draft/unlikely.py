"""Unlikely: proposes what the target just found least likely, so that nothing is ever accepted.

A yardstick, not a speed-up: what speculation costs when it never pays, and whether a controller notices. Lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import chain


@dataclass(slots=True)
class Unlikely:
    name: str = "accept-none"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _contexts: dict[int, Context] = field(default_factory=dict)
    _worst: dict[int, int] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self._contexts[slot], self._worst[slot] = context, 0

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        trees = [
            chain(int(self._contexts[s].tokens[-1]), [self._worst[s]] * min(b.nodes, b.depth), origin=self.name)
            for s, b in zip(slots, budgets, strict=True)
        ]
        return Proposals(trees)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            assert record.scores.logits is not None
            self._worst[slot] = int(record.scores.logits[0].argmin())
