"""Draft model: a smaller model with the target's vocabulary, in a slot cache of its own, as a source for any grower.

Papers: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Lossless. Cost: one forward of the small
model a tree level, over the whole batch; after a step it keeps the accepted keys and values and re-runs only what it
has not seen (the last accepted token, when that was a leaf).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.protocols import Chunk, Context, Needs, StepRecord, Target
from outrider.tree import QRow, TokenTree, chain, fixed


@dataclass(slots=True)
class _Seat:
    """One sequence's place in the draft model's cache."""

    slot: int
    context: Context
    lead: list[int] = field(default_factory=list)  # tokens not yet in the draft's cache, the pending one last
    run: TokenTree | None = None  # the nodes of this step that went through the draft model
    started: bool = False  # whether it was asked in this step


@dataclass(slots=True)
class ModelSource:
    target: Target  # the draft model's own runtime
    width: int = 256  # how many of the likeliest tokens a row keeps
    name: str = "draft-model"
    needs: Needs = field(default_factory=Needs)
    _seats: dict[int, _Seat] = field(default_factory=dict)

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        seat = _Seat(self.target.acquire(), context)
        self._seats[slot] = seat
        for _ in self.target.prefill([seat.slot], [context.tokens.tolist()], Needs()):
            pass
        seat.lead = [int(context.tokens[-1])]

    def end(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None:
            self.target.release(seat.slot)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        seats = [self._seats[slot] for slot in slots]
        for seat in seats:
            self._catch_up(seat)
        leads = [chain(seat.lead[0], seat.lead[1:]) for seat in seats]
        scores = self.target.verify([seat.slot for seat in seats], leads, Needs())
        out = []
        for seat, own in zip(seats, scores, strict=True):
            assert own.logits is not None
            seat.run, seat.started = None, True
            out += seat.context.draft_rows(own.logits[-1:], [()], self.width)
        return out

    def _catch_up(self, seat: _Seat) -> None:
        """After steps without speculation the draft lags behind: run what it missed, in pieces that fit."""
        while len(seat.lead) > self.target.max_rows // 2:
            piece, seat.lead = seat.lead[: self.target.max_rows], seat.lead[self.target.max_rows :]
            if not seat.lead:
                piece, seat.lead = piece[:-1], piece[-1:]
            self.target.verify([seat.slot], [chain(piece[0], piece[1:])], Needs())
            self.target.commit([seat.slot], [range(1, len(piece))])

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        seats = [self._seats[slot] for slot in slots]
        joined = [_behind(seat.lead, tree) for seat, tree in zip(seats, trees, strict=True)]
        known = [len(seat.lead) - 1 + count for seat, count in zip(seats, done, strict=True)]
        scores = self.target.verify([seat.slot for seat in seats], joined, Needs(), known)
        out = []
        for seat, tree, count, own in zip(seats, trees, done, scores, strict=True):
            assert own.logits is not None
            seat.run = tree
            paths = [tree.path_tokens(node) for node in range(count, len(tree))]
            out.append(seat.context.draft_rows(own.logits[: len(paths)], paths, self.width))
        return out

    def observe(self, slot: int, record: StepRecord) -> None:
        """Keep what was accepted and already run; the rest waits for the next start."""
        seat = self._seats[slot]
        asked, seat.started = seat.started, False
        if not asked or record.tree.candidates == 0 or not record.emitted:  # nothing of it that could stay
            seat.lead.extend(record.emitted)
            return
        kept = _followed(seat.run, record.tree.path_tokens(record.verdict.path[-1])) if record.verdict.path else []
        before = len(seat.lead) - 1
        self.target.commit([seat.slot], [[*range(1, before + 1), *(before + node for node in kept)]])
        seat.lead = list(record.emitted[len(kept) :])


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
