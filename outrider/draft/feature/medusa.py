"""Medusa: a few heads that each guess one token further ahead, all from the target's last feature.

arXiv 2401.10774. Lossless: a distribution depends on the depth alone, so a tree is drawn from the product of the heads'
distributions, or takes their likeliest tokens as point masses, and says so. Head k reads the feature before the pending
token and says the token k + 1 places behind it. No cache but one feature a sequence: it goes on wherever the target
was run last. Cost: all heads in one product a step, whatever the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.numeric.likeliest import head_distributions
from outrider.core.protocols import Context
from outrider.core.records import Chunk, Needs, StepRecord
from outrider.core.tree import QRow
from outrider.draft.marginals import Marginals


class HeadsShape(Protocol):
    @property
    def layer(self) -> int: ...  # of the target, whose feature is read
    @property
    def vocab(self) -> int: ...  # tokens that the heads can say


class Heads(Protocol):
    """The network: one head a depth."""

    ids: Tensor  # [vocab]: the target's id of each of its tokens

    @property
    def shape(self) -> HeadsShape: ...
    @property
    def deepest(self) -> int: ...  # how many heads there are
    def parameters(self) -> Iterator[Tensor]: ...
    def state(self, number: int, feature: Tensor, path: Tensor) -> Tensor: ...  # of a head, after the tokens of `path`
    def logits(self, state: Tensor) -> Tensor: ...  # over its tokens


@dataclass(slots=True)
class Seat:
    """One sequence: the feature before its pending token."""

    context: Context
    feature: Tensor | None = None  # [d]


class HeadsSource:
    """What sources over heads share: one feature a sequence, and distributions from states."""

    def __init__(
        self, net: Heads, embed: Callable[[Tensor], Tensor], *, width: int = 64,
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """`embed` is the target's; `active` surrounds every forward; a distribution keeps its `width` likeliest
        tokens."""
        self.net, self.embed, self.width, self.active = net, embed, min(width, net.shape.vocab), active
        self.needs = Needs(hidden=(net.shape.layer,))
        weight = next(net.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.seats: dict[int, Seat] = {}

    def begin(self, slot: int, context: Context) -> None:
        self.seats[slot] = Seat(context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.seats[chunk.slot].feature = self._kept(chunk.scores.hidden[self.net.shape.layer][-1])

    def end(self, slot: int) -> None:
        self.seats.pop(slot, None)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            rows = [0, *record.verdict.path][: len(record.emitted)]
            if rows:
                self.seats[slot].feature = self._kept(record.scores.hidden[self.net.shape.layer][rows[-1]])

    def features(self, slots: Sequence[int]) -> Tensor:
        """[slots, d]."""
        return torch.stack([feature for slot in slots if (feature := self.seats[slot].feature) is not None])

    def distributions(self, slots: Sequence[int], states: Tensor) -> list[QRow]:
        """One a row of states; `slots` says whose it is."""
        temperature = [self.seats[slot].context.temperature or 1.0 for slot in slots]
        with self.active():
            logits = self.net.logits(states)
        return head_distributions(logits, temperature, self.net.ids, self.width)

    def _kept(self, feature: Tensor) -> Tensor:
        """A copy: the rows around it may go."""
        return feature.to(self.device, self.dtype, copy=True)


class MedusaSource(Marginals, HeadsSource):
    name = "medusa"

    @torch.inference_mode()
    def marginals(self, slots: Sequence[int]) -> list[list[QRow]]:
        """After each pending token, a head each; none where the target has no feature yet."""
        ready = [slot for slot in slots if self.seats[slot].feature is not None]
        if not ready:
            return [[] for _ in slots]
        heads, blank, features = self.net.deepest, torch.empty(0, device=self.device), self.features(ready)
        with self.active():
            states = torch.stack([self.net.state(number, features, blank) for number in range(heads)], 1)
        rows = self.distributions([slot for slot in ready for _ in range(heads)], states.flatten(0, 1))
        found = {slot: rows[at * heads : (at + 1) * heads] for at, slot in enumerate(ready)}
        return [found.get(slot, []) for slot in slots]
