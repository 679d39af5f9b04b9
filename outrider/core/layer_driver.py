"""What passes between a drafter that goes on from the target's hidden states and whatever runs its one trained layer.

The drafter knows the text, which rows of it wait and which tree grows; a driver knows the network, where its keys and
values lie and which kernels run it. Rows of candidates stand behind those of the text in the driver's cache and are
written over later, so that going back costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.tree import QRow, TokenTree


@dataclass(slots=True, eq=False)
class PassStates:
    """The target's hidden states at all rows of one pass, as a driver reads them: one for all slots of the pass."""

    read: Callable[[], tuple[Tensor, ...]]  # taken from the target's when they are wanted, most never are
    _layers: tuple[Tensor, ...] | None = None

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """One a layer, [rows of the pass, d]."""
        if self._layers is None:
            self._layers = self.read()
        return self._layers


@dataclass(frozen=True, slots=True)
class Features:
    """Rows of one text where the target has been."""

    states: PassStates
    first: int  # where the rows of this slot begin among those of the pass
    count: int  # and how many ran
    rows: Sequence[int]  # of these, those that are text

    def joined(self) -> Tensor:
        """[rows, layers * d]"""
        first, count = self.first + self.rows[0], len(self.rows)
        if list(self.rows) == list(range(self.rows[0], self.rows[0] + count)):
            return torch.cat([states[first : first + count] for states in self.states.layers], -1)
        whole = torch.cat([states[self.first : self.first + self.count] for states in self.states.layers], -1)
        return whole[torch.tensor(self.rows, device=whole.device)]

    def without_last(self) -> tuple[Features | None, Features]:
        """What stands before the last row, and the last row."""
        before = replace(self, rows=self.rows[:-1]) if len(self.rows) > 1 else None
        return before, replace(self, rows=self.rows[-1:])

    def alone(self) -> Features:
        """The same rows, without the rest of their pass."""
        kept = tuple(states[self.first + self.rows[0]][None].clone() for states in self.states.layers)
        assert len(self.rows) == 1, "of a single row"
        return Features(PassStates(lambda: kept), 0, 1, (0,))


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """The rows that one slot has in a forward: they see the first `base` rows of the cache, and `sees` from there."""

    slot: int
    base: int
    start: int  # where the first of them is stored
    positions: NDArray[np.int64]  # [rows], in the text
    sees: NDArray[np.bool_]  # [rows, n]
    tokens: Sequence[int]
    states: Tensor  # [rows, d]

    @property
    def reach(self) -> int:
        return self.base + self.sees.shape[1]


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What a driver says of its network and of itself."""

    layers: tuple[int, ...]  # of the target, whose hidden states it reads
    hidden: int  # how many dimensions of them: the first
    vocab: int  # tokens that it can say
    device: torch.device
    dtype: torch.dtype
    # Rows of text that a sequence catches up with after a long rest, so that reading them never costs more than a
    # draft brings; 0: all of them.
    catches_up: int = 0


class TextDriver(Protocol):
    """Reads the target's features along texts. Changes its cache only."""

    @property
    def traits(self) -> LayerTraits: ...
    def fuse(self, features: Tensor) -> Tensor: ...  # [rows, layers * d] -> [rows, d]: states where the target has been
    def forward(self, pieces: Sequence[LayerPiece]) -> list[Tensor]: ...  # the states after these rows, [rows, d] each


class LayerDriver(TextDriver, Protocol):
    """Runs one trained layer over the target's features. Changes its cache only."""

    @property
    def net(self) -> Any: ...  # the network it runs
    def embed(self, tokens: Tensor) -> Tensor: ...  # the target's embeddings, as wide and as precise as the network
    def distributions(
        self, states: Sequence[Tensor], temperatures: Sequence[float], width: int
    ) -> list[list[QRow]]: ...  # after each row of each slot's states: the likeliest tokens, likeliest first
    def renewed(self, net: Any) -> LayerDriver: ...  # for a network of the same shape, on the same cache; ready to run


@dataclass(frozen=True, slots=True)
class Wanted:
    """One slot's part of a proposal that is made as a whole."""

    slot: int
    depth: int
    length: int  # rows of text in the cache
    missed: int  # rows of text before them that it never held: positions run on
    temperature: float
    tokens: NDArray[np.int64]  # the token after each row that waits
    waiting: Sequence[Features]  # rows of text that come next


class TreesFound(Protocol):
    """What one proposal found for several slots."""

    def tree(self, i: int, pending: int, nodes: int, origin: str) -> TokenTree: ...  # the likeliest nodes of slot i


class TreeDriver(Protocol):
    """Makes whole proposals at once, up to the depth that it was made for. Changes the driver's cache only."""

    @property
    def driver(self) -> LayerDriver: ...  # whose network, cache and text it goes on from
    @property
    def text_rows(self) -> int: ...  # that may wait of a slot
    @property
    def largest_batch(self) -> int: ...
    def prepare(self, batch: int, deepest: int) -> None: ...  # now what proposals for so many slots would wait for
    def propose(self, wanted: Sequence[Wanted], nodes: int, deepest: int) -> TreesFound: ...


class MaskFiller(Protocol):
    """Runs a network that says a whole block of tokens in one pass, from what it read of the text."""

    @property
    def traits(self) -> LayerTraits: ...
    @property
    def deepest(self) -> int: ...  # tokens of a block
    def blocks(self, wanted: Sequence[Wanted], width: int) -> list[list[QRow]]:
        """Of each slot the distribution at each depth, whatever is drafted at the others: its `width` likeliest tokens.

        Changes state: the rows of text that wait are in the cache, and may be handed over again.
        """
        ...


class BlockDriver(MaskFiller, TextDriver, Protocol):
    """One that reads the target's features."""


class TextBlockDriver(MaskFiller, Protocol):
    """One that reads the text itself; what a slot wants begins with the tokens that the cache lacks."""

    def read(self, slot: int, start: int, tokens: Sequence[int]) -> None: ...  # to the cache, from this place on
