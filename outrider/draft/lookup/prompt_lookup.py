"""Prompt lookup: copy what followed an earlier occurrence of the last few tokens, in the prompt or the output so far.

Paper: the idea is Saxena's prompt lookup decoding (2023), LLMA (arXiv 2304.04487) before it. Lossless: candidates are
point masses. Cost: one dictionary entry a token and n-gram size; a proposal is at most `max_ngram` look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import TokenTree, chain


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one sequence was last followed by another token."""

    context: Context
    places: list[dict[tuple[int, ...], int]]  # [n - 1]: n-gram -> position after its latest occurrence
    indexed: int = 0  # tokens whose following position is known

    def catch_up(self) -> None:
        """Index every n-gram that has a successor; the newest one has none yet, so it can never match itself."""
        tokens = self.context.tokens
        # Only the tail is read, as Python integers: a tuple of numpy scalars hashes several times slower.
        start = max(self.indexed - len(self.places), 0)
        tail = tokens[start:].tolist()
        for end in range(max(self.indexed, 1), len(tokens)):
            for n, places in enumerate(self.places, 1):
                if end >= n:
                    places[tuple(tail[end - n - start : end - start])] = end
        self.indexed = len(tokens)


@dataclass(slots=True)
class PromptLookup:
    max_ngram: int = 3
    min_ngram: int = 1
    name: str = "prompt-lookup"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    _slots: dict[int, _Index] = field(default_factory=dict)

    def begin(self, slot: int, context: Context) -> None:
        self._slots[slot] = _Index(context, [{} for _ in range(self.max_ngram)])
        self._slots[slot].catch_up()

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Reads nothing but the text."""

    def end(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._copy(self._slots[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot in slots:
            self._slots[slot].catch_up()

    def _copy(self, index: _Index, budget: Budget) -> TokenTree:
        tokens = index.context.tokens
        suffix = tokens[-self.max_ngram :].tolist()
        length = min(budget.nodes, budget.depth)
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            place = index.places[n - 1].get(tuple(suffix[-n:]))
            if place is not None:
                copied = tokens[place : place + length].tolist()
                # A match that reaches the end of the text goes on copying its own copy: a loop continues as a loop.
                period = len(tokens) - place
                while len(copied) < length:
                    copied.append(copied[-period])
                return chain(suffix[-1], copied, origin=self.name)
        return chain(suffix[-1], ())
