"""Draft model: a smaller model with the target's vocabulary, with a cache for itself, as a source for any grower.

Papers: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Lossless. Cost: one forward of the small
model a tree level, over the whole batch; after a step it keeps the accepted keys and values and re-runs only what it
has not seen (the last accepted token, when that was a leaf). Where its context or its rows are used up it proposes
nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.core.protocols import Context, Target
from outrider.core.records import NO_NEEDS, Chunk, Needs, Piece, StepRecord
from outrider.core.schedule import run_all
from outrider.core.tree import QRow, TokenTree, chain, fixed

TOP_STATES = Needs(hidden=(-1,))
EMPTY = QRow(np.empty(0, dtype=np.int64), np.empty(0))  # nothing to propose


@dataclass(slots=True)
class _Seat:
    """One sequence's place in the draft model's cache."""

    slot: int
    context: Context
    lead: list[int] = field(default_factory=list)  # of this step: tokens not yet in the cache, the pending one last
    ran: TokenTree | None = None  # of this step: the nodes that went through the draft model
    started: bool = False  # whether it was asked in this step


@dataclass(slots=True)
class ModelSource:
    target: Target  # the draft model's own runtime
    width: int = 256  # how many of the likeliest tokens a row keeps
    name: str = "draft-model"
    needs: Needs = field(default_factory=Needs)
    shows: bool = False  # the hidden states of its passes, to `states`
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _ran: dict[int, Tensor] = field(default_factory=dict)  # by its slots: last hidden states of the pass before

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = _Seat(self.target.acquire(), context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """The same stretches of text through the draft model, where it stands at their beginning."""
        texts = []
        for chunk in chunks:
            slot, end = self._seats[chunk.slot].slot, chunk.start + len(chunk.tokens)
            if self.target.length(slot) == chunk.start and end < self.target.max_context:
                texts.append((slot, chunk.tokens))
        run_all(self.target, texts)

    def end(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None:
            self.target.release(seat.slot)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        seats = [self._seats[slot] for slot in slots]
        fitting = [seat for seat in seats if len(seat.context.tokens) <= self.target.max_context]
        self._catch_up(fitting)
        for seat in fitting:
            seat.ran, seat.started = None, True
        logits = self._logits([Piece(seat.slot, tree=chain(seat.lead[0], seat.lead[1:])) for seat in fitting])
        return [
            seat.context.draft_rows(logits[seat.slot][-1:], [()], self.width)[0] if seat.slot in logits else EMPTY
            for seat in seats
        ]

    def _catch_up(self, seats: Sequence[_Seat]) -> None:
        """Run what the draft has missed (steps without speculation, a prompt that it was not handed) but for a short
        lead, which goes into the pass of the tree's root."""
        behind = []
        for seat in seats:
            tokens, cached = seat.context.tokens, self.target.length(seat.slot)
            if len(tokens) - cached > self.target.max_rows // 2:
                behind.append((seat.slot, tokens[cached:-1].tolist()))
        run_all(self.target, behind)
        for seat in seats:
            seat.lead = seat.context.tokens[self.target.length(seat.slot) :].tolist()

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        seats = [self._seats[slot] for slot in slots]
        pieces = []
        for seat, tree, count in zip(seats, trees, done, strict=True):
            if self._fits(seat, tree):
                seat.ran = tree
                pieces.append(Piece(seat.slot, tree=_behind(seat.lead, tree), done=len(seat.lead) - 1 + count))
        logits = self._logits(pieces)
        answers = []
        for seat, tree, count in zip(seats, trees, done, strict=True):
            paths = [tree.path_tokens(node) for node in range(count, len(tree))]
            rows = logits.get(seat.slot)
            answers.append([EMPTY] * len(paths) if rows is None else seat.context.draft_rows(rows, paths, self.width))
        return answers

    def _fits(self, seat: _Seat, tree: TokenTree) -> bool:
        deepest, rows = len(seat.context.tokens) - 1 + tree.depth, len(seat.lead) - 1 + len(tree)
        return seat.started and deepest < self.target.max_context and rows <= self.target.max_rows

    def _logits(self, pieces: Sequence[Piece]) -> dict[int, Tensor]:
        """One pass of the draft model: its rows, by its slots."""
        scores = self.target.run(pieces, TOP_STATES if self.shows else NO_NEEDS) if pieces else ()
        self._ran = {p.slot: s.hidden[-1] for p, s in zip(pieces, scores, strict=True)} if self.shows else {}
        return {p.slot: s.logits for p, s in zip(pieces, scores, strict=True) if s.logits is not None}

    def states(self, slots: Sequence[int]) -> list[Tensor]:
        """[nodes, d] each, where it `shows` them: behind the final norm; none for a slot that did not fit."""
        nothing = torch.empty(0, 0, device=self.target.device)
        return [self._ran.get(self._seats[slot].slot, nothing) for slot in slots]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """Keep what was accepted and already run; the rest waits for the next start."""
        keeping, paths = [], []
        for slot, record in zip(slots, records, strict=True):
            seat, path = self._seats[slot], record.verdict.path
            if seat.started:
                kept = _followed(seat.ran, record.tree.path_tokens(path[-1])) if path else []
                before = len(seat.lead) - 1
                keeping.append(seat.slot)
                paths.append([*range(1, before + 1), *(before + node for node in kept)])
                seat.started = False
        if keeping:
            self.target.commit(keeping, paths)


def _followed(tree: TokenTree | None, tokens: Sequence[int]) -> list[int]:
    """The nodes of `tree` that spell the first of these tokens, as far as it goes."""
    path = [0]
    while tree is not None and len(path) <= len(tokens) and (node := tree.child(path[-1], tokens[len(path) - 1])) > 0:
        path.append(node)
    return path[1:]


def _behind(lead: Sequence[int], tree: TokenTree) -> TokenTree:
    """The tree with the tokens the draft has not cached yet in front; lead[-1] is the tree's own node 0."""
    shift = len(lead) - 1
    if shift == 0:
        return tree
    tokens = np.concatenate([np.array(lead[:-1], dtype=np.int64), tree.tokens])
    parents = np.concatenate([np.arange(-1, shift - 1, dtype=np.int64), tree.parents + shift])
    return fixed(tokens, parents)
