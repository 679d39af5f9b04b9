"""Waiting: sequences that have no slot yet, and who of them is next.

The lowest priority is served first. Requests of one caller and priority wait in line; the first of a line gains one
level for every `ageing` seconds that nobody of its line was served, so a high number waits at most that long for each
level that others are ahead of it, and then for a slot. Of equal levels the caller is next who was served the fewest
tokens lately, and then who came first. A caller who comes anew is next of equals, and has no other credit from before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from outrider.core.sequence import Running


@dataclass(slots=True)
class _Line:
    """Requests of one caller and priority."""

    members: deque[Running] = field(default_factory=deque)
    served: float = 0.0  # when one of them was let in last


class Waiting:
    def __init__(self, ageing: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.ageing, self.clock = ageing, clock
        self._lines: dict[tuple[str, int], _Line] = {}
        self._tokens: dict[str, float] = {}  # served to each caller who waits or runs
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Running]:
        return (s for line in list(self._lines.values()) for s in list(line.members))

    def add(self, s: Running) -> None:
        """Changes state: behind those of its caller and priority."""
        self._line(s).members.append(s)
        self._count += 1

    def put_back(self, s: Running) -> None:
        """Changes state: before all others of its caller and priority; it ran already."""
        self._line(s).members.appendleft(s)
        self._count += 1

    def remove(self, s: Running) -> None:
        """Changes state: it does not wait any more; nothing where it did not."""
        key = (s.terms.caller, s.terms.priority)
        if key in self._lines and s in self._lines[key].members:
            self._lines[key].members.remove(s)
            self._count -= 1
            self._tidy(key)

    def first(self) -> Running | None:
        """Who is next."""
        best = self._best()
        return self._lines[best].members[0] if best else None

    def take(self, s: Running) -> None:
        """Changes state: it is let in."""
        key = (s.terms.caller, s.terms.priority)
        line = self._lines[key]
        line.members.remove(s)
        self._count -= 1
        line.served = self.clock()
        self.charge(s, len(s.history.tokens))
        self._tidy(key)

    def charge(self, s: Running, tokens: int) -> None:
        """Changes state: the caller of this sequence was served so many tokens."""
        caller = s.terms.caller
        if caller in self._tokens:
            self._tokens[caller] += tokens

    def forget(self, callers: set[str]) -> None:
        """Changes state: callers who neither wait nor run, but for these, have no account any more."""
        kept = callers | {caller for caller, _ in self._lines}
        self._tokens = {caller: tokens for caller, tokens in self._tokens.items() if caller in kept}

    def _line(self, s: Running) -> _Line:
        caller = s.terms.caller
        if caller not in self._tokens:
            self._tokens[caller] = min(self._tokens.values(), default=0.0) - 0.5  # before those who have as much
        key = (caller, s.terms.priority)
        if key not in self._lines:
            self._lines[key] = _Line(served=self.clock())
        return self._lines[key]

    def _tidy(self, key: tuple[str, int]) -> None:
        if not self._lines[key].members:
            del self._lines[key]

    def _best(self) -> tuple[str, int] | None:
        now = self.clock()

        def rank(key: tuple[str, int]) -> tuple[float, float, float]:
            line = self._lines[key]
            level = key[1] - int((now - line.served) / self.ageing)
            return level, self._tokens[key[0]], line.members[0].submitted

        return min(self._lines, key=rank, default=None)
