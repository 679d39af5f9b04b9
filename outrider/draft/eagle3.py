"""EAGLE-3: one trained layer that goes on from the target's own hidden states, as a source for any grower.

arXiv 2503.01840; trees as in EAGLE-2 (arXiv 2406.16858) come from the grower. Lossless. Where the target has been, the
layer reads its true features, never its own guesses; inside a tree each candidate reads its parent's state and sees the
text and its ancestors. A single sequence on the CPU that was not asked for long goes on with the newest rows and never
sees the others that it slept through. Its laws follow the temperature; other warping is left to verification. Cost: one
forward of the layer a tree level over the whole batch, and one over the accepted tokens a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.draft.eagle3_layer import Eagle3Shape
from outrider.draft.feature_cache import FeatureCache
from outrider.draft.head_laws import NOTHING, head_laws
from outrider.protocols import Chunk, Context, Needs, Scores, StepRecord
from outrider.tree import QRow, TokenTree

AT_ONCE = 64  # rows of text that wait for the next draft; more are run by themselves
HELD = 256  # rows of the target's features that are kept for them: those of whole trees, as they are
LATE = 8  # rows of text that a single sequence catches up with after a long rest; those before are left out


class FeatureLayer(Protocol):
    """One decoder layer over the target's features: `Eagle3Layer` says what each of these does."""

    shape: Eagle3Shape
    ids: Tensor
    fc: torch.nn.Linear

    def fuse(self, features: Tensor) -> Tensor: ...
    def enter(self, embedded: Tensor, state: Tensor) -> Tensor: ...
    def project(self, embedded: Tensor, state: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]: ...
    def finish(self, state: Tensor, attended: Tensor) -> Tensor: ...
    def logits(self, state: Tensor) -> Tensor: ...


class LoneLayer(Protocol):
    """The same network for the rows of one sequence, in fewer and faster calls; `eagle3_native` has one."""

    most: int  # rows of one `forward`

    def fuse(self, features: Tensor) -> Tensor: ...
    def forward(
        self, embedded: Tensor, state: Tensor, positions: NDArray[np.int64], sees: NDArray[np.bool_], base: int,
        start: int, keys: Tensor, values: Tensor,
    ) -> Tensor: ...  # fmt: skip
    def laws(self, states: Tensor, heat: float, width: int) -> list[QRow]: ...


@dataclass(slots=True)
class Piece:
    """Rows of text where the target has been: its hidden states at all rows that it ran with them, untouched."""

    read: Callable[[], tuple[Tensor, ...]]  # the states: taken from the target's when they are wanted, most never are
    rows: Sequence[int]  # those that are text
    _hidden: tuple[Tensor, ...] | None = None

    @property
    def hidden(self) -> tuple[Tensor, ...]:
        """One a layer, [n, d]."""
        if self._hidden is None:
            self._hidden = self.read()
        return self._hidden

    def features(self) -> Tensor:
        """[rows, 3d]"""
        joined = torch.cat(self.hidden, -1)
        first, count = self.rows[0], len(self.rows)
        if list(self.rows) == list(range(first, first + count)):
            return joined[first : first + count]
        return joined[torch.tensor(self.rows, device=joined.device)]

    def without_last(self) -> tuple[Piece | None, Piece]:
        """What stands before the last row, and the last row."""
        before = Piece(self.read, self.rows[:-1]) if len(self.rows) > 1 else None
        return before, Piece(self.read, self.rows[-1:])


@dataclass(slots=True)
class Seat:
    """One sequence. The row of position t reads the target's features at t and the token at t + 1."""

    context: Context
    length: int = 0  # rows of text in the cache
    missed: int = 0  # rows of text that it will never hold: positions run on, the layer sees the others
    waiting: list[Piece] = field(default_factory=list)  # features of the rows that come next
    ran: int = 0  # of these pieces, those whose rows the cache holds already: running them again changes nothing
    states: Tensor | None = None  # [nodes, d] of the tree in flight; node 0 is the last row of the text

    @property
    def rows(self) -> int:
        """That wait."""
        return sum(len(piece.rows) for piece in self.waiting)

    def settle(self) -> None:
        """Changes state: what the cache holds need not wait."""
        if not self.ran:
            return
        self.length += sum(len(piece.rows) for piece in self.waiting[: self.ran])
        self.waiting, self.ran = self.waiting[self.ran :], 0

    def miss(self) -> None:
        """Changes state: all but the newest rows that wait are left out."""
        rows = self.rows
        while rows - (first := len(self.waiting[0].rows)) >= LATE:
            del self.waiting[0]
            rows, self.missed = rows - first, self.missed + first

    def following(self) -> NDArray[np.int64]:
        """The token after each row that waits."""
        first = self.length + self.missed + 1
        return self.context.tokens[first : first + self.rows]

    def features(self) -> Tensor:
        """[rows, 3d]"""
        return torch.cat([piece.features() for piece in self.waiting])


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one slot in one forward: they see the first `base` cache rows, and `sees` from there on."""

    slot: int
    base: int
    start: int  # where the first of them is stored
    positions: NDArray[np.int64]  # [rows]
    sees: NDArray[np.bool_]  # [rows, n]
    tokens: Sequence[int]
    states: Tensor  # [rows, d]

    @property
    def reach(self) -> int:
        return self.base + self.sees.shape[1]


class Eagle3Source:
    name = "eagle3"

    def __init__(
        self, net: FeatureLayer, embed: Callable[[Tensor], Tensor], *, width: int = 64,
        active: Callable[[], AbstractContextManager[None]] = nullcontext, cache: FeatureCache | None = None,
        lone: Callable[[FeatureLayer], LoneLayer | None] | None = None,
    ) -> None:  # fmt: skip
        """`embed` is the target's; `active` surrounds every forward; a law keeps its `width` likeliest tokens.

        `lone` makes of a network what runs single sequences in its place, where it can, and keeps the last. Sources of
        one target may share a `cache`: a slot belongs to one of them at a time. A network narrower than the target
        reads the first dimensions of features and embeddings.
        """
        self.net, self._embed, self.width, self.active = net, embed, min(width, net.shape.vocab), active
        self.needs = Needs(hidden=net.shape.layers)
        weight = net.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = cache or FeatureCache(net.shape.kv_heads, net.shape.head_dim, weight.dtype, weight.device)
        self._seats: dict[int, Seat] = {}
        self._make_lone = lone
        self._lone = net, lone(net) if lone else None

    @property
    def lone(self) -> LoneLayer | None:
        """Of the network in use, which may be another than before."""
        if self._lone[0] is not self.net:
            self._lone = self.net, self._make_lone(self.net) if self._make_lone else None
        return self._lone[1]

    def ready(self, net: FeatureLayer) -> None:
        """So that a network that will be exchanged for the one in use can draft at once; for any thread."""
        if self._make_lone is not None:
            self._make_lone(net)

    def seat(self, slot: int) -> Seat:
        return self._seats[slot]

    def knows(self, slot: int) -> bool:
        """Whether the target has been anywhere in this text yet."""
        return bool(self._seats[slot].waiting)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embed(tokens)[..., : self.net.shape.hidden].to(self.dtype)

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        self._seats[slot] = seat = Seat(context)
        self.cache.reserve(slot + 1, 0)
        for chunk in chunks:
            if chunk.slot == slot:
                seat.waiting.append(self._piece(chunk.scores, range(len(chunk.tokens))))
                self.absorb(slot)

    def end(self, slot: int) -> None:
        self._seats.pop(slot, None)

    @torch.inference_mode()
    def start(self, slots: Sequence[int]) -> list[QRow]:
        """The law after each pending token, from the target's features before it; nothing where there are none yet."""
        fresh = [slot for slot in slots if self._seats[slot].waiting]
        for slot in fresh if self.lone is not None else ():
            self._seats[slot].miss()
        blocks = [self._text(slot, self._seats[slot]) for slot in fresh]
        for slot, block, states in zip(fresh, blocks, self._forward(blocks), strict=True):
            seat = self._seats[slot]
            seat.length, seat.waiting, seat.ran, seat.states = block.reach, [], 0, states[-1:]
        roots = {slot: own[:1] for slot in slots if (own := self._seats[slot].states) is not None}
        laws = dict(zip(roots, self._laws(list(roots), list(roots.values())), strict=True))
        for slot in roots:
            self._seats[slot].states = roots[slot]  # a tree that was begun and left is forgotten
        return [laws[slot][0] if slot in laws else NOTHING for slot in slots]

    @torch.inference_mode()
    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        blocks = []
        for slot, tree, first in zip(slots, trees, done, strict=True):
            seat = self._seats[slot]
            assert seat.states is not None and len(seat.states) == first, "earlier nodes ran before"
            last = seat.length - 1  # the row of node 0; node i stands i rows behind it
            states = seat.states[torch.from_numpy(tree.parents[first:]).to(self.device)]
            positions = last + seat.missed + tree.depths[first:]
            sees = tree.ancestor_mask()[first:]
            blocks.append(_Block(slot, last, last + first, positions, sees, tree.tokens[first:].tolist(), states))
        out = self._forward(blocks)
        for slot, states in zip(slots, out, strict=True):
            seat = self._seats[slot]
            assert seat.states is not None
            seat.states = torch.cat([seat.states, states])
        return self._laws(slots, out)

    def observe(self, slot: int, record: StepRecord) -> None:
        """The target's features of what was accepted take the place of our own, with the next draft."""
        seat = self._seats[slot]
        rows = [0, *record.verdict.path][: len(record.emitted)]
        if rows:
            seat.settle()
            seat.waiting.append(self._piece(record.scores, rows))
            seat.states = None
            if self.lone is not None:
                if len(seat.waiting) > 2 * LATE:  # not in every step; the rest when they are wanted
                    seat.miss()
            elif seat.rows > AT_ONCE or sum(len(piece.hidden[0]) for piece in seat.waiting) > HELD:
                self.absorb(slot)

    def _piece(self, scores: Scores, rows: Sequence[int]) -> Piece:
        return Piece(partial(self._states, scores.hidden), rows)

    def _states(self, hidden: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        width = self.net.shape.hidden
        every = (hidden[layer][:, :width] for layer in self.net.shape.layers)
        return tuple(states.to(self.device, self.dtype) for states in every)

    @torch.inference_mode()
    def absorb(self, slot: int) -> None:
        """Changes state: run all that waits but the last row, whose law the next draft wants."""
        seat = self._seats[slot]
        before, last = seat.waiting[-1].without_last()
        seat.waiting = [*seat.waiting[:-1], *([before] if before else [])]
        if seat.waiting:
            block = self._text(slot, seat)
            self._forward([block])
            seat.length = block.reach
        kept = tuple(states[last.rows[0] :][:1].clone() for states in last.hidden)
        seat.waiting = [Piece(lambda: kept, (0,))]
        seat.ran = 0

    def _text(self, slot: int, seat: Seat) -> _Block:
        """What waits of the text, as rows behind what the cache holds of it."""
        first, count = seat.length, seat.rows
        positions, sees = first + seat.missed + np.arange(count), np.tri(count, dtype=bool)
        states = (self.lone or self.net).fuse(seat.features())
        return _Block(slot, first, first, positions, sees, seat.following().tolist(), states)

    def _forward(self, blocks: Sequence[_Block]) -> list[Tensor]:
        """The states after these rows, [rows, d] each, all slots in one pass; writes their keys and values."""
        if not blocks:
            return []
        if len(blocks) == 1 and (lone := self.lone) is not None and len(blocks[0].tokens) <= lone.most:
            return [self._forward_lone(blocks[0], lone)]
        counts = [len(b.tokens) for b in blocks]
        batch, rows, reach = len(blocks), max(counts), max(b.reach for b in blocks)
        inputs = np.zeros((2, batch, rows), dtype=np.int64)
        sees = np.zeros((batch, 1, rows, reach), dtype=bool)
        sees[..., 0] = True  # so that padded rows stay finite
        for i, (block, count) in enumerate(zip(blocks, counts, strict=True)):
            inputs[0, i, :count], inputs[1, i, :count] = block.tokens, block.positions
            sees[i, 0, :count, : block.base] = True
            sees[i, 0, :count, block.base : block.reach] = block.sees
        tokens, positions = torch.from_numpy(inputs).to(self.device)
        state = blocks[0].states[None] if batch == 1 else torch.stack([_padded(b.states, rows) for b in blocks])
        mask = None if sees.all() else torch.from_numpy(sees).to(self.device)
        slots = [block.slot for block in blocks]
        self.cache.reserve(0, reach)
        with self.active():
            embedded = self.embed(tokens)
            state = self.net.enter(embedded, state)
            q, k, v = self.net.project(embedded, state, positions)
            self.cache.write(slots, [block.start for block in blocks], counts, k, v)
            state = self.net.finish(state, _attend(q, *self.cache.read(slots, reach), mask))
        return [own[:count] for own, count in zip(state, counts, strict=True)]

    def _forward_lone(self, block: _Block, lone: LoneLayer) -> Tensor:
        self.cache.reserve(0, block.reach)
        keys, values = self.cache.whole
        embedded = self.embed(torch.tensor(block.tokens))
        return lone.forward(embedded, block.states, block.positions, block.sees, block.base, block.start,
                            keys[block.slot], values[block.slot])  # fmt: skip

    def _laws(self, slots: Sequence[int], states: Sequence[Tensor]) -> list[list[QRow]]:
        """One law a state, likeliest first: one product with the head and one transfer for the whole batch."""
        if not slots:
            return []
        if len(slots) == 1 and (lone := self.lone) is not None:
            return [lone.laws(states[0], self._seats[slots[0]].context.temperature or 1.0, self.width)]
        heat = [
            self._seats[slot].context.temperature or 1.0 for slot, own in zip(slots, states, strict=True) for _ in own
        ]
        with self.active():
            logits = self.net.logits(torch.cat(list(states)))
        rows = iter(head_laws(logits, heat, self.net.ids, self.width))
        return [[next(rows) for _ in own] for own in states]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Query heads that share a key head become rows of one problem: [B, Hq, R, D]."""
    batch, heads, rows, dim = q.shape
    group = heads // k.shape[1]
    folded = q.reshape(batch, k.shape[1], group * rows, dim)
    wide = mask.repeat(1, 1, group, 1) if mask is not None else None
    # on CUDA the libraries may plan anew for every length of text, which takes longer than the products
    attend = _softmax_attention if folded.is_cuda else scaled_dot_product_attention
    return attend(folded, k, v, attn_mask=wide).reshape(batch, heads, rows, dim)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    scores = scores if attn_mask is None else scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def _padded(states: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, rows - len(states)))
