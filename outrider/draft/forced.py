"""Forced: replays a known answer and errs on purpose, so that every branch of verification runs for many steps.

For tests and the losslessness gate: `accept=1` is accepted whole, `accept=0` never, between them each depth is right
with that probability. `decoys` wrong siblings stand before the right child, so accepted paths are not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, fixed

Answers = Callable[[Context], Sequence[int]]  # the whole output that plain decoding gives for this sequence


@dataclass(slots=True)
class Forced:
    answers: Answers
    vocab_size: int
    accept: float = 1.0
    decoys: int = 0
    name: str = "forced"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _contexts: dict[int, Context] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self._contexts[slot] = context

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._contexts.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._replay(self._contexts[s], b, n) for s, b, n in zip(slots, budgets, noise, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Learns nothing."""

    def _replay(self, context: Context, budget: Budget, noise: Noise) -> TokenTree:
        answer = self.answers(context)[len(context.output) :]
        tokens, parents = [int(context.tokens[-1])], [-1]
        parent, on_track = 0, True
        for depth in range(min(budget.depth, budget.nodes // (self.decoys + 1), len(answer))):
            on_track = on_track and noise.coin(self.accept, depth, 0)
            right = int(answer[depth])
            wrong = [(right + 1 + i) % self.vocab_size for i in range(self.decoys + (not on_track))]
            level = [*wrong, right] if on_track else wrong
            tokens += level
            parents += [parent] * len(level)
            parent = len(tokens) - 1
        return fixed(np.array(tokens), np.array(parents), origin=self.name)
