"""A finite automaton over token ids, given as a table: the plainest constraint there is, and the measure of the others.

For vocabularies small enough to write down, and for what is known as tokens rather than as text. Exact. A mask costs
a packed row that is made once a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Finite:
    """State 0 is the first. `table[state][token]` is the state behind the token; the text may end in `accepting`."""

    table: Sequence[Mapping[int, int]]
    accepting: frozenset[int]
    vocab_size: int
    _words: dict[int, NDArray[np.int32]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for state, row in enumerate(self.table):
            for token, after in row.items():
                if not 0 <= token < self.vocab_size or not 0 <= after < len(self.table):
                    raise InputError(
                        f"state {state} goes by token {token} to state {after}; one of them does not exist"
                    )

    def start(self, prompt: Sequence[int]) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return self.table[state].get(int(token))

    def mask(self, states: Sequence[int]) -> NDArray[np.int32]:
        return np.stack([self._row(state) for state in states])

    def allows(self, state: int, token: int) -> bool:
        return token in self.table[state]

    def forced(self, state: int) -> Sequence[int]:
        """As long as one token alone may follow and the text may not end."""
        run: list[int] = []
        seen = set()
        while len(self.table[state]) == 1 and state not in self.accepting and state not in seen:
            seen.add(state)
            ((token, state),) = self.table[state].items()
            run.append(token)
        return run

    def complete(self, state: int) -> bool:
        return state in self.accepting

    def _row(self, state: int) -> NDArray[np.int32]:
        if state not in self._words:
            bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
            bits[list(self.table[state])] = 1
            self._words[state] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._words[state]
