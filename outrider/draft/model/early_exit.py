"""DEL: which of the target's layers to leave at, and how far to draft, chosen anew for every step.

arXiv 2504.05598. Each exit is a drafter of its own (the target's first layers with shared weights and a cache). What
every exit would have said is read off the target's own states of verified rows, so that the acceptance of all is known,
used or not. Chosen is the exit l and length d of most expected tokens a layer: (1 - a^(d+1)) / (1 - a) over the layers
that d drafts and one verification run. Lossless: the choice hangs on the past only. An exit that was not in use catches
up in one forward. Cost: the head over a few states of each exit a step, and a cache an exit that has been used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Drafter, Noise
from outrider.core.records import Budget, Chunk, Needs, Scores, StepRecord
from outrider.core.tree import TokenTree, root

Read = Callable[[Tensor], tuple[Tensor, Tensor]]  # states [n, d] -> likeliest token [n] and its chance [n]
LOOK_BACK = 32  # rows of a prompt on which exits are tried at first
KEEP = 0.95  # of what was seen, a row later


class Stop(Protocol):
    """Where drafting at an exit ends: as soon as it is less sure than this."""

    threshold: float


@dataclass(slots=True)
class Rates:
    """How often each exit says what the target says; older rows count less."""

    hits: NDArray[np.float64]  # [exits]
    rows: float = 0.0

    def see(self, hit: NDArray[np.bool_]) -> None:
        """hit[exit, row], in the order of the text."""
        fade = KEEP ** np.arange(hit.shape[1] - 1, -1, -1)
        past = KEEP ** hit.shape[1]
        self.hits = past * self.hits + hit @ fade
        self.rows = past * self.rows + fade.sum()

    @property
    def acceptance(self) -> NDArray[np.float64]:
        """[exits], within 0.01 .. 0.99; one half before anything was seen."""
        return np.clip((self.hits + 0.5) / (self.rows + 1.0), 0.01, 0.99)


def best_exit(
    acceptance: NDArray[np.float64], costs: NDArray[np.float64], whole: float, longest: int
) -> tuple[int, int]:
    """(exit, length) of most expected tokens per cost; length 0, plain decoding, is always a choice.

    costs[exit] is that of one drafted token, `whole` that of a verification, in any one unit.
    """
    lengths = np.arange(longest + 1)
    tokens = (1 - acceptance[:, None] ** (lengths + 1)) / (1 - acceptance[:, None])
    rate = tokens / (costs[:, None] * lengths + whole)
    exit_, length = np.unravel_index(int(rate.argmax()), rate.shape)
    return int(exit_), int(length)


@dataclass(slots=True)
class Sureness:
    """The mean chance an exit gives to what it says, when it is right and when it is not."""

    sums: NDArray[np.float64] = field(default_factory=lambda: np.array([0.9, 0.3]))  # right, wrong
    counts: NDArray[np.float64] = field(default_factory=lambda: np.ones(2))

    def see(self, hit: NDArray[np.bool_], chance: NDArray[np.float64]) -> None:
        past = KEEP ** len(hit)
        for i, rows in enumerate((hit, ~hit)):
            self.sums[i] = past * self.sums[i] + chance[rows].sum()
            self.counts[i] = past * self.counts[i] + rows.sum()

    @property
    def between(self) -> float:
        right, wrong = self.sums / np.maximum(self.counts, 1e-3)
        return float(np.clip((right + wrong) / 2, 0.0, 1.0))


@dataclass(slots=True)
class _Seat:
    context: Context
    rates: Rates
    begun: set[int] = field(default_factory=set)  # exits that follow this sequence
    used: int = -1  # the exit of the step in flight


class DynamicExit:
    name = "del"
    shared_noise = False

    def __init__(
        self, exits: Mapping[int, Drafter], read: Read, *, layers: int, head: float = 0.0, longest: int = 12,
        stops: Mapping[int, Stop] | None = None,
    ) -> None:  # fmt: skip
        """`exits`: a drafter for each number of first layers; `head`: what the head costs, counted in layers."""
        self.layers = tuple(sorted(exits))
        self.exits = [exits[layer] for layer in self.layers]
        self.stops = [(stops or {}).get(layer) for layer in self.layers]
        self.read, self.longest = read, longest
        self.costs = np.array(self.layers, dtype=np.float64) + head
        self.whole = layers + head
        self.needs = Needs(hidden=self.layers)
        self.sure = [Sureness() for _ in self.layers]
        self._seats: dict[int, _Seat] = {}

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = _Seat(context, Rates(np.zeros(len(self.layers))))

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if len(chunk.tokens) > 1:
                rows = list(range(len(chunk.tokens) - 1))[-LOOK_BACK:]
                said = [int(chunk.tokens[row + 1]) for row in rows]
                self._learn(self._seats[chunk.slot], chunk.scores, rows, said)

    def end(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None:
            for exit_ in seat.begun:
                self.exits[exit_].end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        trees: dict[int, TokenTree] = {}
        levels = 0
        groups: dict[int, list[tuple[int, Budget, Noise]]] = {}
        for slot, budget, stream in zip(slots, budgets, noise, strict=True):
            seat = self._seats[slot]
            longest = min(self.longest, budget.nodes, budget.depth)
            exit_, length = best_exit(seat.rates.acceptance, self.costs, self.whole, longest)
            if length:
                groups.setdefault(exit_, []).append((slot, Budget(length, length), stream))
            else:
                trees[slot] = root(int(seat.context.tokens[-1]))
        for exit_, members in groups.items():
            drafter, stop = self.exits[exit_], self.stops[exit_]
            if stop is not None:
                stop.threshold = self.sure[exit_].between
            for slot, _, _ in members:
                seat = self._seats[slot]
                seat.used = exit_
                if exit_ not in seat.begun:
                    drafter.begin(slot, seat.context)
                    seat.begun.add(exit_)
            made = drafter.propose(*zip(*members, strict=True))
            trees |= dict(zip((slot for slot, _, _ in members), made, strict=True))
            levels += made.levels
        return Proposals([trees[slot] for slot in slots], levels)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        seats = [self._seats[slot] for slot in slots]
        for number, drafter in enumerate(self.exits):
            if told := [
                (slot, record if number == seat.used else _bare(record))
                for slot, seat, record in zip(slots, seats, records, strict=True)
                if number in seat.begun
            ]:
                drafter.observe(*zip(*told, strict=True))
        for seat, record in zip(seats, records, strict=True):
            seat.used = -1
            if rows := [0, *record.verdict.path][: len(record.emitted)]:
                self._learn(seat, record.scores, rows, record.emitted)

    @torch.inference_mode()
    def _learn(self, seat: _Seat, scores: Scores, rows: Sequence[int], said: Sequence[int]) -> None:
        """What every exit would have said after these rows, whose prefixes are the text, against what was said."""
        states = torch.cat([scores.hidden[layer][list(rows)] for layer in self.layers])
        tokens, chances = (part.cpu().numpy().reshape(len(self.layers), -1) for part in self.read(states))
        hit = tokens == np.array(said)
        seat.rates.see(hit)
        for sureness, hits, chance in zip(self.sure, hit, chances.astype(np.float64), strict=True):
            sureness.see(hits, chance)


def _bare(record: StepRecord) -> StepRecord:
    """The same step to an exit that was not asked: as if nothing had been proposed."""
    return replace(record, tree=root(int(record.tree.tokens[0])))
