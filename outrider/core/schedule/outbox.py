"""Outbox: sequences whose last step has still to be counted and delivered, where that can wait for the next pass.

Nothing of it is needed to run that pass: stops are found before. Who leaves, and whoever looks at a sequence, does it
for that one first. Where a pass keeps the host waiting anyhow, it is done there, and otherwise at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outrider.core.protocols import Target
from outrider.core.sequence import Running


class Outbox:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._waiting: deque[Running] = deque()

    def put(self, batch: Iterable[Running]) -> None:
        """Changes state: these have said something."""
        self._waiting.extend(batch)
        if (meanwhile := self._target.traits.meanwhile) is not None:
            meanwhile(self.empty)
        else:
            self.empty()

    def empty(self) -> None:
        """Changes state: all have been told. Safe to call again."""
        while self._waiting:
            if not (s := self._waiting.popleft()).left:  # who has left has been told everything
                s.deliver()
