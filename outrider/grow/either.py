"""Either: one grower for sequences that sample their candidates, another for those that take the likeliest.

Re-ranked point masses are the best use of nodes for greedy text, draws from the draft's distribution for sampled text.
Lossless as its two growers are; it changes no tree of theirs. Cost: that of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.protocols import Grower, Noise, Source
from outrider.core.records import Budget, StepRecord
from outrider.core.tree import TokenTree


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
            if at := [i for i, slot_noise in enumerate(noise) if (slot_noise is not None) == draws]:
                its_slots, its_pending = [slots[i] for i in at], [pending[i] for i in at]
                made = grower.grow(source, its_slots, its_pending, [budgets[i] for i in at], [noise[i] for i in at])
                trees |= dict(zip(at, made, strict=True))
        return [trees[i] for i in range(len(slots))]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.likeliest.observe(slots, records)
        self.drawn.observe(slots, records)
