"""Recorded: a source over one trained layer whose whole proposals a driver makes at once where nothing is drawn.

Lossless: the point masses, and the trees, of `grow/topk.py`. What waited for long of the text, and slots whose
candidates are drawn, take the path by source and grower; so does everything once a proposal failed, which is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.core.layer_driver import LayerDriver, TreeDriver
from outrider.core.proposals import Proposals
from outrider.core.protocols import Noise
from outrider.core.records import Budget
from outrider.core.tree import TokenTree, root
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.grown import Grown

log = logging.getLogger("outrider")


@runtime_checkable
class Layered(Protocol):
    """A source over one trained layer, or one that stands before it."""

    def layered(self) -> Eagle3Source: ...


@dataclass(slots=True)
class Recorded(Grown):
    """A source and a grower, and a driver of whole trees that does the work of both where nothing is drawn.

    The tree of a smaller budget is the best of a larger one, since a node's value never rises along a path.
    """

    make: Callable[[LayerDriver], TreeDriver] | None = None  # for the driver that the source has now
    depth: int = 6  # as the grower's
    always: bool = False  # the grower draws for nobody
    _whole: TreeDriver | None = None
    _broken: bool = False

    def prepare(self, batch: int) -> None:
        """Changes state: what is asked of it for up to so many slots is recorded now, not in the middle of a text."""
        if isinstance(self.source, Eagle3Source) and not self._broken:
            try:
                self._whole_of(self.source).prepare(batch, self.depth)
            except Exception as error:
                self._give_up(error)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        mine = [i for i, slot in enumerate(slots) if self._at_once(slot)]
        if not mine:
            return Grown.propose(self, slots, budgets, noise)
        trees = self._replay([slots[i] for i in mine], [budgets[i] for i in mine])
        if trees is None:
            return Grown.propose(self, slots, budgets, noise)
        made = dict(zip(mine, trees, strict=True))
        levels = self.depth if any(tree.candidates for tree in trees) else 0  # all of them are run
        if rest := [i for i in range(len(slots)) if i not in made]:
            others = Grown.propose(self, [slots[i] for i in rest], [budgets[i] for i in rest], [noise[i] for i in rest])
            made |= dict(zip(rest, others, strict=True))
            levels += others.levels
        return Proposals([made[i] for i in range(len(slots))], levels)

    def _at_once(self, slot: int) -> bool:
        return (
            isinstance(self.source, Layered)
            and not self._broken
            and (self.always or not self.sampled or self._contexts[slot].temperature <= 0)
        )

    def _replay(self, slots: Sequence[int], budgets: Sequence[Budget]) -> list[TokenTree] | None:
        """None where these have to go through source and grower."""
        assert isinstance(self.source, Layered)
        source = self.source.layered()
        pending = [int(self._contexts[slot].tokens[-1]) for slot in slots]
        limits = [budget & Budget(budget.nodes, self.depth) for budget in budgets]
        able = [i for i, slot in enumerate(slots) if limits[i] and source.knows(slot)]
        if not able:
            return [root(token) for token in pending]
        try:
            whole = self._whole_of(source)
            if len(slots) > whole.largest_batch:
                return None
            if long := [slots[i] for i in able if source.seat(slots[i]).rows > whole.text_rows]:
                source.catch_up(long)
            wanted = [source.seat(slots[i]).wanted(slots[i], limits[i].depth) for i in able]
            found = whole.propose(wanted, max(limits[i].nodes for i in able), self.depth)
        except Exception as error:
            self._give_up(error)
            return None
        made = {}
        for at, i in enumerate(able):
            made[i] = found.tree(at, pending[i], limits[i].nodes, self.name)
            seat = source.seat(slots[i])
            seat.ran = len(seat.waiting)
        return [made[i] if i in made else root(token) for i, token in enumerate(pending)]

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        log.warning("drafts of %s are not recorded but made step by step: %s", self.name, error)

    def _whole_of(self, source: Eagle3Source) -> TreeDriver:
        if self._whole is None or self._whole.driver is not source.driver:
            assert self.make is not None
            self._whole = self.make(source.driver)
        return self._whole
