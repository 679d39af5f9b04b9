"""What a drafter over the target's hidden states keeps of each sequence: the rows of text it has, and those to come.

Shared by drafters of one layer and of several. Rows of text wait with their features until the next draft wants them;
what was not handed over (a prefix that the target held already, or, where the driver says so, rows that waited for too
long) is left out: positions are those of the text. Knows no network and no tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.layer_driver import Features, LayerPiece, PassStates, TextDriver, Wanted
from outrider.core.protocols import Context
from outrider.core.records import Chunk, HiddenRows, Needs, Scores, StepRecord

ROWS_AT_ONCE = 64  # rows of text that wait for the next draft; more are run by themselves
HELD_ROWS = 256  # rows of the target's features that are kept for them: those of whole trees, as they are


@dataclass(slots=True)
class Seat:
    """One sequence. The row of position t reads the target's features at t and the token at t + 1."""

    context: Context
    length: int = 0  # rows of text in the cache
    missed: int = 0  # rows of text that it will never hold: positions run on, the layer sees the others
    waiting: list[Features] = field(default_factory=list)  # of the rows that come next
    ran: int = 0  # of these stretches, those whose rows the cache holds already: running them again changes nothing
    states: Tensor | None = None  # [nodes, d] of the tree in flight; node 0 is the last row of the text

    @property
    def rows(self) -> int:
        """How many wait."""
        return sum(len(features.rows) for features in self.waiting)

    @property
    def held(self) -> int:
        """Rows of the target's that are kept for those that wait."""
        return sum(features.count for features in self.waiting)

    def starts_at(self, position: int) -> None:
        """Changes state: what comes next is the row of this position; those before it are left out."""
        if self.length + self.missed + self.rows != position:
            self.missed, self.waiting, self.ran = position - self.length, [], 0

    def goes_on_at(self, position: int) -> None:
        """Changes state: the same where it was not told of all steps."""
        if position > self.length + self.missed + self.rows:
            self.starts_at(position)

    def settle(self) -> None:
        """Changes state: what the cache holds need not wait."""
        if not self.ran:
            return
        self.length += sum(len(features.rows) for features in self.waiting[: self.ran])
        self.waiting, self.ran = self.waiting[self.ran :], 0

    def miss_all_but(self, newest: int) -> None:
        """Changes state: all but about so many of the rows that wait are left out."""
        rows = self.rows
        while rows - (first := len(self.waiting[0].rows)) >= newest:
            del self.waiting[0]
            rows, self.missed = rows - first, self.missed + first

    def following(self) -> NDArray[np.int64]:
        """The token after each row that waits."""
        first = self.length + self.missed + 1
        return self.context.tokens[first : first + self.rows]

    def features(self) -> Tensor:
        """[rows, layers * d]"""
        return torch.cat([features.joined() for features in self.waiting])

    def wanted(self, slot: int, depth: int) -> Wanted:
        """Its part of a proposal that is made as a whole."""
        temperature = self.context.temperature or 1.0
        return Wanted(slot, depth, self.length, self.missed, temperature, self.following(), self.waiting)


class TextReader:
    """Tells a driver of the target's features along the text; what drafts from them says how."""

    driver: TextDriver

    def __init__(self, driver: TextDriver) -> None:
        self.driver, self.needs = driver, Needs(hidden=driver.traits.layers)
        self._seats: dict[int, Seat] = {}

    def seat(self, slot: int) -> Seat:
        return self._seats[slot]

    def knows(self, slot: int) -> bool:
        """Whether there is anything to go on from: features of the text."""
        return bool(self._seats[slot].waiting)

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = Seat(context, missed=len(context.tokens) - 1)  # all of the prompt, unless it is absorbed

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Changes state: what comes first of a slot may stand anywhere in its prompt; the layer goes on from there."""
        seen: dict[int, PassStates] = {}
        for chunk in chunks:
            seat = self._seats[chunk.slot]
            seat.starts_at(chunk.start)
            seat.waiting.append(self._features(chunk.scores, range(len(chunk.tokens)), seen))
        self.catch_up(list(dict.fromkeys(chunk.slot for chunk in chunks)))

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """The target's features of what was accepted take the place of the layer's guesses, with the next draft."""
        newest, behind, seen = self.driver.traits.catches_up, list[int](), dict[int, PassStates]()
        for slot, record in zip(slots, records, strict=True):
            seat = self._seats[slot]
            rows = [0, *record.verdict.path][: len(record.emitted)]
            if not rows:
                continue
            seat.settle()
            seat.goes_on_at(len(seat.context.tokens) - 1 - len(rows))
            seat.waiting.append(self._features(record.scores, rows, seen))
            seat.states = None
            if newest:
                if len(seat.waiting) > 2 * newest:  # not in every step; the rest when they are wanted
                    seat.miss_all_but(newest)
            elif seat.rows > ROWS_AT_ONCE or seat.held > HELD_ROWS:
                behind.append(slot)
        if behind:
            self.catch_up(behind)

    @torch.inference_mode()
    def catch_up(self, slots: Sequence[int]) -> None:
        """Changes state: run all that waits but the last row of each slot, after which the next draft goes on."""
        last: dict[int, Features] = {}
        for slot in slots:
            seat = self._seats[slot]
            before, last[slot] = seat.waiting[-1].without_last()
            seat.waiting = [*seat.waiting[:-1], *([before] if before else [])]
        behind = [slot for slot in slots if self._seats[slot].waiting]
        pieces = [self._text(slot, self._seats[slot]) for slot in behind]
        self.driver.forward(pieces)
        for slot, piece in zip(behind, pieces, strict=True):
            self._seats[slot].length = piece.reach
        for slot, features in last.items():
            seat = self._seats[slot]
            seat.waiting, seat.ran = [features.alone()], 0

    def _features(self, scores: Scores, rows: Sequence[int], seen: dict[int, PassStates]) -> Features:
        """`seen`: of the passes whose states were read already, by the identity of those."""
        hidden = HiddenRows.of(scores.hidden)
        states = seen.get(id(hidden.whole))
        if states is None:
            states = seen[id(hidden.whole)] = PassStates(partial(self._states, hidden.whole))
        return Features(states, hidden.first, hidden.count, rows)

    def _states(self, hidden: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        traits = self.driver.traits
        every = (hidden[layer][:, : traits.hidden] for layer in traits.layers)
        return tuple(states.to(traits.device, traits.dtype) for states in every)

    def _text(self, slot: int, seat: Seat) -> LayerPiece:
        """What waits of the text, as rows behind what the cache holds of it."""
        first, count = seat.length, seat.rows
        positions, sees = first + seat.missed + np.arange(count), np.tri(count, dtype=bool)
        states = self.driver.fuse(seat.features())
        return LayerPiece(slot, first, first, positions, sees, seat.following().tolist(), states)
