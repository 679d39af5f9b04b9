"""DEER: a model of some of the target's layers that reads the text itself and fills a block of masks in one pass.

arXiv 2512.15176. Lossless: the distribution at a depth does not hang on what is drafted at the others, so errors do not
add up along a draft, and draws say so. The text is read causally, with a cache that is exact. Begins anywhere: what it
was not handed it reads from the context. Asks nothing of the target but text. Cost: its layers over the accepted tokens
and over the block, once a step each; a prompt is read when the first draft wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.core.layer_driver import TextBlockDriver, Wanted
from outrider.core.protocols import Context
from outrider.core.records import NO_NEEDS, Chunk, StepRecord
from outrider.core.tree import QRow
from outrider.draft.marginals import Marginals

TOGETHER = 32  # tokens of text that are read in one pass with those of other slots; more are read alone


@dataclass(slots=True)
class Seat:
    """One sequence."""

    context: Context
    length: int = 0  # tokens of the text in the cache


class DeerSource(Marginals):
    def __init__(self, driver: TextBlockDriver, *, width: int = 64, name: str = "deer") -> None:
        """A distribution keeps its `width` likeliest tokens."""
        self.driver, self.width, self.name, self.needs = driver, min(width, driver.traits.vocab), name, NO_NEEDS
        self._seats: dict[int, Seat] = {}

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = Seat(context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """The text says it all."""

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """The text says it all: rows of a block stand behind it in the cache and are written over."""

    @torch.inference_mode()
    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]:
        wanted = []
        for slot in slots:
            seat = self._seats[slot]
            tokens = seat.context.tokens
            # what was read by an earlier proposal is behind; the last token is read again with the block
            if len(tokens) - 1 - seat.length > TOGETHER:
                self.driver.read(slot, seat.length, tokens[seat.length : -1].tolist())
                seat.length = len(tokens) - 1
            temperature = seat.context.temperature or 1.0
            wanted.append(Wanted(slot, self.driver.deepest, seat.length, 0, temperature, tokens[seat.length :], ()))
            seat.length = len(tokens) - 1
        return self.driver.blocks(wanted, self.width)
