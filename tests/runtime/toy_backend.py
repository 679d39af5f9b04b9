"""The smallest backend there is: a log-linear model of a few tokens back, whose cache is the tokens themselves.

It reads what is committed from its cache only, and what is forgotten there is marked, so that a slot that is not what
it should be shows in the scores of the next pass. Scores are the same to the last bit in any pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.protocols import Target
from outrider.core.records import Needs, Scores, Traits
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.blocks.kept import KeptTexts
from outrider.runtime.blocks.stretches import StretchSlots
from outrider.runtime.cache import moves
from outrider.runtime.passes import Block

NOTHING = -1  # in place of a token


class TokenCache:
    def __init__(self, slots: int, capacity: int) -> None:
        self.rows = [np.full(capacity, NOTHING) for _ in range(slots)]

    @property
    def bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for slot, source, target in moves(slots, lengths, paths):
            self.rows[slot][target] = self.rows[slot][source]
        for slot, length, path in zip(slots, lengths, paths, strict=True):
            self.cut(slot, length + 1 + len(path))

    def copy(self, source: int, target: int, length: int) -> None:
        self.rows[target][:length] = self.rows[source][:length]

    def rows_at(self, slot: int, begin: int, end: int) -> NDArray[np.int64]:
        return self.rows[slot][begin:end].copy()

    def put(self, slot: int, begin: int, rows: NDArray[np.int64], count: int) -> None:
        self.rows[slot][begin : begin + count] = rows[:count]

    def cut(self, slot: int, length: int) -> None:
        self.rows[slot][length:] = NOTHING

    def wipe(self, slot: int) -> None:
        self.cut(slot, 0)


class NGram:
    """Logits are a sum over the last tokens, each with a matrix of its own by how far it is back."""

    def __init__(self, vocab: int, back: int = 3, seed: int = 0) -> None:
        self.weights = 2.0 * np.random.default_rng(seed).standard_normal((back, vocab + 1, vocab)).astype(np.float32)

    def logits(self, text: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        assert NOTHING not in list(text), "a token was forgotten"
        back = len(self.weights)
        last = [NOTHING] * back + [int(token) for token in text[-back:]]
        total = self.weights[0, last[-1]]
        for distance in range(1, back):
            total = total + self.weights[distance, last[-1 - distance]]
        return total


class ToyBackend:
    device = torch.device("cpu")
    token_bytes = 8
    max_rows = prompt_rows = None
    block_size, reserves = 1, True

    def __init__(
        self, model: NGram, *, context: int = 200, mixes: bool = True,
        make_cache: Callable[[int, int], TokenCache] = TokenCache,
    ) -> None:  # fmt: skip
        self.model, self.vocab_size, self._context, self._make = model, model.weights.shape[2], context, make_cache
        self.traits = Traits("toy", same_bits=True, mixes=mixes)
        self.passes: list[list[Block]] = []

    def slot_bytes(self, rows: int) -> int:
        return 0

    def positions(self) -> tuple[int, str]:
        return self._context, "the toy ends there"

    def allocate(self, bounds: Bounds) -> tuple[TokenCache, Allocator]:
        self.cache = self._make(bounds.slots, bounds.capacity)
        return self.cache, StretchSlots(self.cache, bounds.slots, bounds.slots * bounds.capacity, KeptTexts(9, 4))

    def check(self, target: Target, self_test: bool | None) -> None:
        """It is the model."""

    def refresh(self, model: object) -> None:
        """It holds no copies."""

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Nothing is made beforehand."""

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        self.passes.append(list(blocks))
        return [self._scores(block, needs) for block in blocks]

    def _scores(self, block: Block, needs: Needs) -> Scores:
        row = self.cache.rows[block.slot]
        row[block.length + block.done : block.reach] = block.tokens[block.done :]
        if not block.scored(needs):
            return Scores(None)
        texts = [[*row[: block.length], *row[block.length : block.reach][sees]] for sees in block.sees]
        return Scores(torch.from_numpy(np.stack([self.model.logits(text) for text in texts])))
