"""Medusa: a few heads that each guess one token further ahead, all from the target's last feature.

arXiv 2401.10774. Lossless: a law depends on the depth alone, so a tree is drawn from the product of the heads' laws, or
takes their likeliest tokens as point masses, and says so. A head is one residual block before the target's own head;
head k reads the feature before the pending token and says the token k + 1 places behind it. No cache but one feature a
sequence. Cost: all heads in one product a step, whatever the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.draft.head_laws import NOTHING, head_laws
from outrider.draft.shared_head import SharedHead
from outrider.protocols import Chunk, Context, Needs, StepRecord
from outrider.tree import QRow, TokenTree


@dataclass(frozen=True, slots=True)
class HeadsShape:
    hidden: int  # d, the target's
    heads: int
    layer: int  # whose feature is read: the target's last
    vocab: int  # tokens the drafter can say

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> HeadsShape:
        return cls(**stored)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MedusaHeads(SharedHead):
    shape: HeadsShape

    def __init__(self, shape: HeadsShape, ids: Tensor, head: nn.Module) -> None:
        super().__init__(shape, ids, head)
        self.blocks = nn.ModuleList(
            nn.Linear(self.reads(number) * shape.hidden, shape.hidden, bias=False) for number in range(shape.heads)
        )

    @property
    def deepest(self) -> int:
        return self.shape.heads

    def reads(self, number: int) -> int:
        """How many vectors head `number` reads."""
        return 1

    def state(self, number: int, feature: Tensor, path: Tensor) -> Tensor:
        """What the target's head reads for the token after `path`: [..., d] and [..., number + 1, d] -> [..., d].

        `path` embeds the tokens behind the feature's, the pending one first; these heads do not look at it.
        """
        return feature + silu(self.blocks[number](feature))


@dataclass(slots=True)
class Seat:
    """One sequence: the feature before its pending token, and the laws made from it."""

    context: Context
    feature: Tensor | None = None  # [d]
    laws: list[QRow] = field(default_factory=list)


class MedusaSource:
    name = "medusa"

    def __init__(
        self, net: MedusaHeads, embed: Callable[[Tensor], Tensor], *, width: int = 64,
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`embed` is the target's; `active` surrounds every forward; a law keeps its `width` likeliest tokens."""
        self.net, self.embed, self.width, self.active = net, embed, min(width, net.shape.vocab), active
        self.needs = Needs(hidden=(net.shape.layer,))
        weight = next(net.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.seats: dict[int, Seat] = {}

    def begin(self, slot: int, context: Context, chunks: Iterable[Chunk]) -> None:
        self.seats[slot] = seat = Seat(context)
        for chunk in chunks:
            if chunk.slot == slot:
                seat.feature = self._kept(chunk.scores.hidden[self.net.shape.layer][-1])

    def end(self, slot: int) -> None:
        self.seats.pop(slot, None)

    @torch.inference_mode()
    def start(self, slots: Sequence[int]) -> list[QRow]:
        """The law after each pending token; nothing where the target has no feature yet."""
        ready = [slot for slot in slots if self.seats[slot].feature is not None]
        heads, blank = self.net.deepest, torch.empty(0, device=self.device)
        if ready:
            features = self.features(ready)
            with self.active():
                states = torch.stack([self.net.state(number, features, blank) for number in range(heads)], 1)
            rows = iter(self.laws([slot for slot in ready for _ in range(heads)], states.flatten(0, 1)))
            for slot in ready:
                self.seats[slot].laws = [next(rows) for _ in range(heads)]
        return [self.seats[slot].laws[0] if slot in ready else NOTHING for slot in slots]

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return [
            [self._at(slot, int(depth)) for depth in tree.depths[first:]]
            for slot, tree, first in zip(slots, trees, done, strict=True)
        ]

    def observe(self, slot: int, record: StepRecord) -> None:
        rows = [0, *record.verdict.path][: len(record.emitted)]
        if rows:
            self.seats[slot].feature = self._kept(record.scores.hidden[self.net.shape.layer][rows[-1]])

    def features(self, slots: Sequence[int]) -> Tensor:
        """[slots, d]."""
        return torch.stack([own for slot in slots if (own := self.seats[slot].feature) is not None])

    def laws(self, slots: Sequence[int], states: Tensor) -> list[QRow]:
        """One a row of states; `slots` says whose it is."""
        heat = [self.seats[slot].context.temperature or 1.0 for slot in slots]
        with self.active():
            logits = self.net.logits(states)
        return head_laws(logits, heat, self.net.ids, self.width)

    def _at(self, slot: int, depth: int) -> QRow:
        laws = self.seats[slot].laws
        return laws[depth] if depth < len(laws) else NOTHING

    def _kept(self, feature: Tensor) -> Tensor:
        """A copy: the rows around it may go."""
        return feature.to(self.device, self.dtype, copy=True)
