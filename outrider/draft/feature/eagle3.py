"""EAGLE-3: one trained layer that goes on from the target's own hidden states, as a source for any grower.

arXiv 2503.01840; trees as in EAGLE-2 (arXiv 2406.16858) come from the grower, and EAGLE-2's and FSPAD's layers are
drafted with in the same way. Lossless. Where the target has been, the layer reads its true features, never its own
guesses; inside a tree each candidate reads its parent's state and sees the text and its ancestors. What the target was
not run over for it (a prefix that it held already, or, where the driver says so, rows that waited for too long) it
leaves out: positions are those of the text, the layer sees the rest. Its distributions follow the temperature; other
warping is left to verification. Knows which rows wait and which tree grows; the network, its cache and its kernels are
the driver's. Cost: one forward of the layer a tree level over the whole batch, and one over the accepted tokens a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.layer_driver import LayerDriver, LayerPiece
from outrider.core.numeric.likeliest import NO_ROW
from outrider.core.tree import QRow, TokenTree
from outrider.draft.feature.text import TextReader


class Eagle3Source(TextReader):
    driver: LayerDriver

    def __init__(self, driver: LayerDriver, *, width: int = 64, name: str = "eagle3") -> None:
        """A distribution keeps its `width` likeliest tokens. Sources of one target may share a driver: a slot belongs
        to one of them at a time."""
        super().__init__(driver)
        self.width, self.name = min(width, driver.traits.vocab), name
        self._newest: dict[int, Tensor] = {}  # states of the nodes that ran last

    def layered(self) -> Eagle3Source:
        """Itself: whoever stands before it gives it by the same name."""
        return self

    def end(self, slot: int) -> None:
        super().end(slot)
        self._newest.pop(slot, None)

    @torch.inference_mode()
    def start(self, slots: Sequence[int]) -> list[QRow]:
        """After each pending token, from the target's features before it; nothing where there are none yet."""
        fresh = [slot for slot in slots if self._seats[slot].waiting]
        if newest := self.driver.traits.catches_up:
            for slot in fresh:
                self._seats[slot].miss_all_but(newest)
        pieces = [self._text(slot, self._seats[slot]) for slot in fresh]
        for slot, piece, states in zip(fresh, pieces, self.driver.forward(pieces), strict=True):
            seat = self._seats[slot]
            seat.length, seat.waiting, seat.ran, seat.states = piece.reach, [], 0, states[-1:]
        roots: dict[int, Tensor] = {}
        for slot in slots:
            seat = self._seats[slot]
            if seat.states is not None:
                seat.states = roots[slot] = seat.states[:1]  # a tree that was begun and left is forgotten
        found = dict(zip(roots, self._distributions(list(roots), list(roots.values())), strict=True))
        return [found[slot][0] if slot in found else NO_ROW for slot in slots]

    @torch.inference_mode()
    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        pieces = []
        for slot, tree, first in zip(slots, trees, done, strict=True):
            seat = self._seats[slot]
            assert seat.states is not None and len(seat.states) == first, "earlier nodes ran before"
            last = seat.length - 1  # the row of node 0; node i stands i rows behind it
            states = seat.states[torch.from_numpy(tree.parents[first:]).to(self.driver.traits.device)]
            positions = last + seat.missed + tree.depths[first:]
            sees = tree.ancestor_mask()[first:]
            pieces.append(LayerPiece(slot, last, last + first, positions, sees, tree.tokens[first:].tolist(), states))
        out = self.driver.forward(pieces)
        for slot, states in zip(slots, out, strict=True):
            seat = self._seats[slot]
            assert seat.states is not None
            seat.states = torch.cat([seat.states, states])
        self._newest = dict(zip(slots, out, strict=True))
        return self._distributions(slots, out)

    def states(self, slots: Sequence[int]) -> list[Tensor]:
        """[nodes, d] each: those that `extend` made last."""
        return [self._newest[slot] for slot in slots]

    def _distributions(self, slots: Sequence[int], states: Sequence[Tensor]) -> list[list[QRow]]:
        """One a state, likeliest first."""
        temperatures = [self._seats[slot].context.temperature or 1.0 for slot in slots]
        return self.driver.distributions(states, temperatures, self.width)
