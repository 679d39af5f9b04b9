"""DiffuSpec: a trigram model beside a block drafter, so that a search finds a path that also reads left to right.

arXiv 2510.02358. Lossless: the path is searched among likely tokens (`grow/block/lattice.py`), never drawn. The paper's
drafter is a pretrained diffusion model of the target's tokenizer; here it is any trained block drafter. Trigrams are
counted in the texts that run, prompts and answers; how a text went on after its last two tokens weighs most, after the
last one less, and every token keeps a little. Bounded in bytes; shared by requests unless asked otherwise, kept with
the other memories. Cost: microseconds a token of text, and two look-ups for each path of the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.protocols import Context, WholeSource
from outrider.core.records import Chunk, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.draft.grown import Grown
from outrider.draft.table.ngram_distributions import Reader, learn, read
from outrider.draft.table.ngram_table import SPAN, clear, new_owner, new_table, restore, stored, windows_of_text

WEIGHTS = {2: 0.65, 1: 0.25}  # of what is known after so many tokens; the rest is every token's
SUCCESSORS = 16  # kept of a context


class Trigrams:
    """Running means of what came after one token and after two, for all texts of one vocabulary."""

    def __init__(self, vocab_size: int, memory_bytes: int) -> None:
        self.vocab_size, self.table = vocab_size, new_table(memory_bytes, SUCCESSORS)
        self._ids, self._probs = np.empty(SUCCESSORS, dtype=np.int64), np.empty(SUCCESSORS)

    def learn(self, owner: int, tokens: NDArray[np.int64], start: int) -> None:
        """Changes state: the tokens from `start` on came where they stand."""
        if len(tokens) <= max(start, 1):
            return
        first = max(start, 1)
        windows = windows_of_text(tokens, first - 1, len(tokens) - 1)
        after = np.full((len(windows), SUCCESSORS), -1, dtype=np.int32)  # one token, as sure as can be
        after[:, 0] = tokens[first:]
        learn(self.table, owner, windows, after, np.ones(after.shape), 2, 1)

    def logs(self, owner: int, window: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The logarithm of the chance of each of these tokens after the last tokens of a text [SPAN]."""
        chances, left = np.zeros(len(tokens)), 1.0
        for order, weight in WEIGHTS.items():
            found, size = read(self.table, Reader(owner, order, order, 1.0), window, self._ids, self._probs)
            if found:
                hits = tokens[:, None] == self._ids[:size]
                chances += weight * (hits * self._probs[:size]).sum(1)
                left -= weight
        return np.log(chances + left / self.vocab_size)


@dataclass(slots=True)
class Seat:
    """One sequence: whose entries it reads and writes, and how much of its text was learnt."""

    context: Context
    owner: int
    learnt: int = 0


class DiffuSpecSource:
    """A block drafter as it is, with a causal model beside it: `grow.block.lattice.CausalSource`."""

    name = "diffuspec"

    def __init__(self, blocks: WholeSource, trigrams: Trigrams, scope: str = "shared") -> None:
        self.blocks, self.trigrams, self.scope, self.needs = blocks, trigrams, scope, blocks.needs
        self._seats: dict[int, Seat] = {}

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = Seat(context, new_owner(self.scope, context.prompt))
        self.blocks.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self.blocks.absorb(chunks)

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)
        self.blocks.end(slot)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.blocks.observe(slots, records)

    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]:
        return self.blocks.marginals(slots)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        return self.blocks.start(slots)

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return self.blocks.extend(slots, trees, done)

    def following(self, slot: int) -> Any:
        """Logarithms of chances behind the slot's text, which is learnt first, and then a path."""
        seat = self._seats[slot]
        tokens = seat.context.tokens
        self.trigrams.learn(seat.owner, tokens, seat.learnt)
        seat.learnt = len(tokens)
        tail = windows_of_text(tokens, len(tokens) - 1, len(tokens))[0]

        def logs(path: Sequence[int], ids: NDArray[np.int64]) -> NDArray[np.float64]:
            window = np.concatenate([tail, np.array(path, dtype=np.int64)])[-SPAN:]
            return self.trigrams.logs(seat.owner, window, ids)

        return logs


@dataclass(slots=True)
class DiffuSpec(Grown):
    """A source and the search, and the memory of the trigrams."""

    @property
    def trigrams(self) -> Trigrams:
        assert isinstance(self.source, DiffuSpecSource)
        return self.source.trigrams

    def memory(self) -> dict[str, NDArray[Any]]:
        return stored(self.trigrams.table)

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        restore(self.trigrams.table, arrays, self.trigrams.vocab_size, largest=1.0 + 1e-3)

    def forget(self) -> None:
        clear(self.trigrams.table)
