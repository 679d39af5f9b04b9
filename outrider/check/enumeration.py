"""Every outcome of a random process with its probability, by replaying it once for each way its noise can fall.

The process must draw through `Branches.noise` only; it is run again and again, depth first, with the choices
prescribed up to the last open one. Nothing is sampled, so laws computed here are exact to rounding. Two uses of one
noise key, and randomness from elsewhere, are errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import InputError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Key = tuple[str | int, ...]


class ReusedNoise(AssertionError):
    """One noise key decided two things."""


class HiddenRandomness(AssertionError):
    """A replay with the same choices took another way: something random did not come through the noise."""


@dataclass(slots=True)
class _Decision:
    key: Key
    values: list[int]  # of positive probability
    probs: list[float]
    chosen: int = 0


@dataclass(slots=True)
class Branches:
    """The choices of one replay. Hands out noise; a new `Branches` is made by `branches`, not by hand."""

    tape: list[_Decision] = field(default_factory=list)  # prescribed choices, extended by each new decision
    used: dict[Key, int] = field(default_factory=dict)  # keys in the order of this replay

    def noise(self, stream: str | int = "verify", step: int = 0, position: int = 0, sample: int = 0) -> BranchingNoise:
        return BranchingNoise(self, stream, step, position, sample)

    def decide(self, key: Key, weights: Tensor | NDArray[np.float64] | list[float]) -> int:
        """The index chosen in this replay among those of positive weight."""
        if key in self.used:
            raise ReusedNoise(f"noise key {key} was used twice")
        at = self.used[key] = len(self.used)
        if at == len(self.tape):
            law = np.asarray(weights, dtype=np.float64)
            assert bool((law >= 0).all()) and law.sum() > 0, f"not a law at {key}: {law}"
            values = np.nonzero(law)[0]
            self.tape.append(_Decision(key, values.tolist(), (law[values] / law.sum()).tolist()))
        decision = self.tape[at]
        if decision.key != key:
            raise HiddenRandomness(f"a replay asked for {key} where it had asked for {decision.key}")
        return decision.values[decision.chosen]

    def probability(self) -> float:
        return math.prod(d.probs[d.chosen] for d in self.tape)

    def next(self) -> Branches | None:
        """The choices of the next replay: the last decision that has another value takes it."""
        tape = self.tape
        while tape and tape[-1].chosen + 1 == len(tape[-1].values):
            tape.pop()
        if not tape:
            return None
        tape[-1].chosen += 1
        return Branches(tape)


@dataclass(frozen=True, slots=True)
class BranchingNoise:
    """`protocols.Noise` that takes every way instead of one. Keys are those of the real streams."""

    branches: Branches
    stream: str | int
    step: int
    position: int
    sample: int

    def coin(self, p: float, node: int, draw: int) -> bool:
        assert 0.0 <= p <= 1.0, f"a coin of probability {p}"
        return bool(self.branches.decide(self._key(node, draw), [1.0 - p, p]))

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        return self.branches.decide(self._key(node, draw), weights)

    def pick(self, probs: Tensor, depth: int) -> int:
        return self.branches.decide(("target", self.sample, self.position + depth), probs)

    def pick_rows(self, probs: Tensor, depths: Sequence[int]) -> list[int]:
        raise AssertionError("every row picked at once would branch on nodes that the walk never reaches")

    def _key(self, node: int, draw: int) -> Key:
        return (self.stream, self.sample, self.step, node, draw)


def branches(run: Callable[[Branches], T], limit: int = 20_000) -> Iterator[tuple[T, float]]:
    """Each outcome of `run` with its probability; the same outcome may come more than once."""
    path: Branches | None = Branches()
    count = 0
    while path is not None:
        if count == limit:
            raise InputError(f"more than {limit} outcomes; choose a smaller tree or vocabulary, or raise the limit")
        result = run(path)
        if len(path.used) != len(path.tape):
            raise HiddenRandomness("a replay ended before its prescribed choices were used up")
        yield result, path.probability()
        count += 1
        path = path.next()


def outcomes(run: Callable[[Branches], K], limit: int = 20_000) -> dict[K, float]:
    """The law of what `run` returns."""
    law: dict[K, float] = {}
    for result, probability in branches(run, limit):
        law[result] = law.get(result, 0.0) + probability
    return law
