"""An automaton asked about single tokens: the same constraint as its mask, where a mask costs more than a few answers.

Exact: with one seed the text is the one that the mask gives. Cost: a step of the automaton for each token of the output
that is new, and a few answers of `allows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.constrain.predicate.weighing import first, weighed
from outrider.core.errors import EmptySupport
from outrider.core.protocols import Automaton

KEPT = 4096  # outputs whose states are remembered


class Stepwise:
    """A `protocols.Predicate` of one prompt. Counts its `calls`, and the tokens it was `asked` for."""

    def __init__(self, automaton: Automaton, prompt: Sequence[int] = (), ends: Iterable[int] = ()) -> None:
        self.automaton, self.ends = automaton, frozenset(ends)
        self.calls = self.asked = 0
        self._states: dict[tuple[int, ...], Any] = {(): automaton.start(prompt)}

    def choose(self, output: Sequence[int], order: Iterator[int]) -> int:
        self.asked += 1
        token = first(order, self._test(output))
        if token is None:
            raise EmptySupport(f"nothing may follow token {len(output)} of the output", tuple(output))
        return token

    def weighed(
        self, output: Sequence[int], order: Iterator[int], probs: NDArray[np.float64]
    ) -> tuple[int | None, float]:  # fmt: skip
        """The same token, None where none may follow, and a weight; changes `probs`."""
        self.asked += 1
        return weighed(order, probs, self._test(output))

    def _test(self, output: Sequence[int]) -> Callable[[int], bool]:
        state = self._at(tuple(output))

        def test(token: int) -> bool:
            self.calls += 1
            if state is None:
                return True
            if token in self.ends:
                return self.automaton.complete(state)
            return self.automaton.allows(state, token)

        return test

    def _at(self, output: tuple[int, ...]) -> Any:
        """None behind what ended the text."""
        if output not in self._states:
            state = self._at(output[:-1])
            ended = state is None or output[-1] in self.ends
            if len(self._states) >= KEPT:
                self._states = {(): self._states[()]}
            self._states[output] = None if ended else self.automaton.advance(state, output[-1])
        return self._states[output]
