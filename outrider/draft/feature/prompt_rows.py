"""Parallel prompt decoding: trained vectors behind candidates make the target itself say what comes later.

arXiv 2405.18628. The pass that verifies this step's candidates also runs prompt rows behind them (`core/rows/side.py`);
those behind the last accepted node are the guesses of the next step, and which node has how many is fixed beforehand
(`grow/sparse_states.py`). Lossless: candidates see no prompt row, and guesses are point masses. Cost: no draft time at
all; rows of the target's pass, of which the prompts are no candidates. Nothing is kept but the guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise
from outrider.core.records import NO_NEEDS, Budget, Chunk, StepRecord
from outrider.core.rows.side import SideRows, chains
from outrider.core.tree import TokenTree, fixed


class State(Protocol):
    """The tree of a step that has guesses for so many tokens; entry 0 of an array is the pending token's."""

    @property
    def paths(self) -> Sequence[tuple[int, ...]]: ...  # of the candidates, by the rank of each guess, parents first
    @property
    def chances(self) -> NDArray[np.float64]: ...  # [1 + candidates]: that a step comes past this node
    @property
    def prompts(self) -> NDArray[np.int64]: ...  # [1 + candidates]: how many rows stand behind it


@dataclass(slots=True)
class Seat:
    """One sequence: the guesses for the tokens after the pending one, and the rows asked for in this step."""

    context: Context
    guesses: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))  # [depths, ranks]
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)  # behind each path of candidates
    asked: list[int] = field(default_factory=list)  # by node


class PromptDrafter:
    name, needs, shared_noise = "ppd", NO_NEEDS, False

    def __init__(self, vectors: Tensor, states: Sequence[State], *, ranks: int) -> None:
        """`vectors` [members, prompts, hidden]; a state for each number of guesses, from none on, of so many ranks."""
        self.vectors, self.states, self.ranks = vectors.detach(), states, ranks
        self.members, self.deepest = vectors.shape[:2]
        self._seats: dict[int, Seat] = {}

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = Seat(context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Prompts of requests say nothing."""

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return Proposals([self._tree(self._seats[slot], budget) for slot, budget in zip(slots, budgets, strict=True)])

    def side_rows(self, slots: Sequence[int], trees: Sequence[TokenTree]) -> list[SideRows | None]:
        """Prompts behind the nodes that were meant to have them, as far as these are in the tree that runs."""
        found = []
        for slot, tree in zip(slots, trees, strict=True):
            seat = self._seats[slot]
            seat.asked = [seat.prompts.get(tuple(tree.path_tokens(node)), 0) for node in range(len(tree))]
            found.append(self._rows(seat.asked))
        return found

    @torch.inference_mode()
    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            seat, side = self._seats[slot], record.scores.side
            last = record.verdict.path[-1] if record.verdict.path else 0
            if side is None or side.logits is None or not seat.asked[last]:
                seat.guesses = seat.guesses[:0]
                continue
            begin, count = sum(seat.asked[:last]), seat.asked[last]
            logits = side.logits.unflatten(0, (self.members, -1))[:, begin : begin + count].float().mean(0)
            seat.guesses = torch.topk(logits, min(self.ranks, logits.shape[1])).indices.cpu().numpy()

    def _tree(self, seat: Seat, budget: Budget) -> TokenTree:
        """Of the state that there are guesses for."""
        state, pending = self.states[len(seat.guesses)], int(seat.context.tokens[-1])
        place: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents, weights = [pending], [-1], [1.0]
        seat.prompts = {(): int(state.prompts[0])}
        for at, path in enumerate(state.paths, 1):
            if len(tokens) > budget.nodes or len(path) > budget.depth or path[:-1] not in place:
                continue
            place[path] = len(tokens)
            parents.append(place[path[:-1]])
            tokens.append(int(seat.guesses[len(path) - 1, path[-1]]))
            weights.append(float(state.chances[at]))
            said = tuple(int(seat.guesses[depth, rank]) for depth, rank in enumerate(path))
            seat.prompts[said] = int(state.prompts[at])
        return fixed(np.array(tokens), np.array(parents), self.name, np.array(weights))

    def _rows(self, asked: Sequence[int]) -> SideRows | None:
        """Each member's chains, one member after the other."""
        every, nodes = [*asked] * self.members, [*range(len(asked))] * self.members
        rows = chains(nodes, every, self.vectors[0])
        if rows is None or self.members == 1:
            return rows
        member = np.arange(len(rows)) // (len(rows) // self.members)
        return SideRows(rows.nodes, rows.offsets, rows.sees, self.vectors[member, rows.offsets - 1])
