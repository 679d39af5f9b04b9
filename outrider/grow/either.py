"""Either: one grower for sequences that draw their candidates, another for those that take the likeliest.

Re-ranked point masses are the best use of nodes for greedy text, draws from the draft's law for sampled text. Lossless
as its two growers are; it changes no tree of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocols import Budget, Grower, Noise, Source, StepRecord
from outrider.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Either:
    likeliest: Grower
    drawn: Grower

    def grow(
        self, source: Source, slots: Sequence[int], pending: Sequence[int], budgets: Sequence[Budget],
        noise: Sequence[Noise | None],
    ) -> list[TokenTree]:  # fmt: skip
        trees: dict[int, TokenTree] = {}
        for grower, draws in ((self.likeliest, False), (self.drawn, True)):
            if at := [i for i, own in enumerate(noise) if (own is not None) == draws]:
                own_slots, own_pending = [slots[i] for i in at], [pending[i] for i in at]
                made = grower.grow(source, own_slots, own_pending, [budgets[i] for i in at], [noise[i] for i in at])
                trees |= dict(zip(at, made, strict=True))
        return [trees[i] for i in range(len(slots))]

    def observe(self, slot: int, record: StepRecord) -> None:
        self.likeliest.observe(slot, record)
        self.drawn.observe(slot, record)
