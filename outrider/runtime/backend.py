"""What a runtime must supply so that `SlotTarget` makes a target of it: a cache, and one pass over rows.

Slots, lengths, bounds and the meaning of a commit are nobody's concern here. A backend is handed blocks of rows that
fit, and answers with their scores; it says of itself what follows from the model and from how it runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.core.protocols import Target
from outrider.core.records import Needs, Scores, Traits
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.cache import Cache
from outrider.runtime.flight import Block


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a cache must hold at once."""

    slots: int
    context: int  # tokens of text in a slot
    rows: int  # of candidates behind them
    bytes: int  # of all together, at most

    @property
    def capacity(self) -> int:
        return self.context + self.rows


class Backend(Protocol):
    """Runs one model in one way. Rows of different slots never see each other; a row sees what its block says."""

    @property
    def traits(self) -> Traits: ...  # all but `slots` and `prompt_rows`; final once `check` has run
    @property
    def device(self) -> torch.device: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...  # that a token takes in the cache
    def slot_bytes(self, rows: int) -> int: ...  # that a slot takes besides, with so many rows in flight
    @property
    def max_rows(self) -> int | None: ...  # of one tree, at most; None: as many as are asked for
    @property
    def prompt_rows(self) -> int | None: ...  # of text in a pass, likewise
    @property
    def block_size(self) -> int: ...  # positions that the cache takes at once
    @property
    def reserves(self) -> bool: ...  # every slot has room for a whole context from the start
    def positions(self) -> tuple[int, str]:
        """How many positions the model may use, and why no more."""
        ...

    def allocate(self, bounds: Bounds) -> tuple[Cache, Allocator]:
        """Changes state: the cache that passes read and write from now on, and who gets which part of it.

        Called once, before anything runs.
        """
        ...

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        """Changes state: one pass over the rows of several slots, of which each has one block.

        Logits only of blocks that are `scored`. Text and candidates come together only where the traits say `mixes`.
        """
        ...

    def check(self, target: Target, self_test: bool | None) -> None:
        """Called once, when every slot is free: raise `UnsupportedModel` where what would run is not the model.

        `self_test`: compare with the model in any case, or in none; None: where nobody has done so before.
        """
        ...

    def refresh(self, model: Any) -> None:
        """Changes state: the weights of the model that it was made of are others now, every copy is made anew.

        Called when every slot is free.
        """
        ...

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Changes state: make ready now what steps of single texts of so many tokens would meet later."""
        ...
