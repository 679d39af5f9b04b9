"""Snapshots: states of a running text at places where it may be taken up again, few enough to be bounded.

A state cannot be cut as keys and values can. So it is copied at borders, every so many tokens; a text that has more
borders than copies are allowed keeps every second one, then every fourth, and so on. A copy is never written to.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Place = tuple[int, int]  # a layer, and which of its recurrences
States = Mapping[Place, Tensor]  # of all layers
PER_TEXT = 4  # copies of a text


class Snapshots:
    def __init__(self, border: int) -> None:
        """`border` tokens lie between two copies, at least."""
        self._border = self._apart = border
        self._held: dict[int, States] = {}  # by length of the text

    def __len__(self) -> int:
        return len(self._held)

    def wanted(self, begin: int, end: int) -> list[int]:
        """Changes state: the lengths at which a text that grows from `begin` to `end` tokens is to be copied."""
        while end // self._apart > PER_TEXT:
            self._apart *= 2
        self._held = {length: states for length, states in self._held.items() if length % self._apart == 0}
        return [length for length in range(self._apart, end + 1, self._apart) if length > begin]

    def put(self, length: int, states: States) -> None:
        """Changes state."""
        self._held[length] = states

    def get(self, length: int) -> States | None:
        return self._held.get(length)

    def last(self, length: int) -> int:
        """The longest beginning of at most `length` tokens of which there is a copy; 0: none."""
        return max((held for held in self._held if held <= length), default=0)

    def cut(self, length: int) -> None:
        """Changes state: forget what lies behind so many tokens."""
        self._held = {held: states for held, states in self._held.items() if held <= length}
        if not length:
            self._apart = self._border

    def update(self, other: Snapshots, length: int) -> None:
        """Changes state: those of another text that begins with the same `length` tokens."""
        self._apart = other._apart
        self._held |= {held: states for held, states in other._held.items() if held <= length}
