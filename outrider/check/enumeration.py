"""Every outcome of a random process with its probability, by replaying it once for each way its noise can fall.

The process must draw through `Branches.noise` only; it is run again and again, depth first, with the choices prescribed
up to the last open one. Nothing is sampled, so probabilities computed here are exact to rounding. Two uses of one noise
key, and randomness from elsewhere, are errors; with `shared` keys a second use gets the bits of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InputError
from outrider.core.noise import MASK, text_hash
from outrider.core.tree import TokenTree

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Key = tuple[str | int, ...]
Bounds = tuple[float, float]
_ROUNDING = 1e-12  # a share of a key's bits smaller than this is none


class ReusedNoise(AssertionError):
    """One noise key decided two things."""


class HiddenRandomness(AssertionError):
    """A replay with the same choices took another way: something random did not come through the noise."""


@dataclass(slots=True)
class _Decision:
    key: Key
    values: list[int]  # of positive probability
    probs: list[float]
    bounds: list[Bounds]  # of the key's uniform, for each value
    chosen: int = 0


@dataclass(slots=True)
class Branches:
    """The choices of one replay. Hands out noise; a new `Branches` is made by `branches`, not by hand."""

    tape: list[_Decision] = field(default_factory=list)  # prescribed choices, extended by each new decision
    shared: bool = False  # a key may come again
    used: dict[Key, Bounds] = field(default_factory=dict)  # what is known of each key's uniform
    made: int = 0  # decisions of this replay

    def noise(self, stream: str | int = "verify", text: int = 0, position: int = 0, sample: int = 0) -> BranchingNoise:
        return BranchingNoise(self, stream, text, position, sample)

    def decide(self, key: Key, weights: Tensor | NDArray[np.float64] | list[float]) -> int:
        """The index chosen in this replay, among those that the key's bits still allow."""
        if key in self.used and not self.shared:
            raise ReusedNoise(f"noise key {key} was used twice")
        at, self.made = self.made, self.made + 1
        if at == len(self.tape):
            self.tape.append(_opened(key, weights, self.used.get(key, (0.0, 1.0))))
        decision = self.tape[at]
        if decision.key != key:
            raise HiddenRandomness(f"a replay asked for {key} where it had asked for {decision.key}")
        self.used[key] = decision.bounds[decision.chosen]
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
        return Branches(tape, self.shared)


def _opened(key: Key, weights: Tensor | NDArray[np.float64] | list[float], known: Bounds) -> _Decision:
    """By inversion: a value is chosen where the uniform falls between the running sums before and after it.

    In Python's numbers: there are a handful, and an array's first operation takes longer than all of them.
    """
    sizes: list[float] = weights if isinstance(weights, list) else weights.tolist()
    total = sum(sizes)
    assert total > 0 and min(sizes) >= 0, f"no probabilities at {key}: {weights}"
    low, high = known
    free = high - low == 1.0
    values: list[int] = []
    shares: list[float] = []
    bounds: list[Bounds] = []
    end = 0.0
    for value, size in enumerate(sizes):
        start, end = end, end + size / total
        if size > 0:
            inside = (max(start, low), min(end, high))
            share = size / total if free else (inside[1] - inside[0]) / (high - low)
            if free or share > _ROUNDING:
                values.append(value)
                shares.append(share)
                bounds.append(inside)
    whole = sum(shares)
    return _Decision(key, values, [share / whole for share in shares], bounds)


@dataclass(frozen=True, slots=True)
class BranchingNoise:
    """`protocols.Noise` that takes every way instead of one. Keys are those of the real streams."""

    branches: Branches
    stream: str | int
    text: int
    position: int
    sample: int

    def coin(self, p: float, node: int, draw: int) -> bool:
        assert 0.0 <= p <= 1.0, f"a coin of probability {p}"
        return bool(self.branches.decide(self._key(node, draw, 0), [1.0 - p, p]))

    def draw(self, weights: Tensor | NDArray[np.float64], node: int, draw: int) -> int:
        return self.branches.decide(self._key(node, draw, 1), weights)

    def pick(self, probs: Tensor, path: Sequence[int]) -> int:
        text = self.text + text_hash(path, self.position) & MASK
        return self.branches.decide(("target", self.sample, text), probs)

    def pick_rows(self, probs: Tensor, tree: TokenTree) -> list[int]:
        raise AssertionError("every row picked at once would branch on nodes that the walk never reaches")

    def _key(self, node: int, draw: int, use: int) -> Key:
        """A coin and a draw at one place have different bits; where no key may come twice, both there is an error."""
        return (self.stream, self.sample, self.text, node, draw, *((use,) if self.branches.shared else ()))


def branches(run: Callable[[Branches], T], limit: int = 20_000, shared: bool = False) -> Iterator[tuple[T, float]]:
    """Each outcome of `run` with its probability; the same outcome may come more than once."""
    path: Branches | None = Branches(shared=shared)
    count = 0
    while path is not None:
        if count == limit:
            raise InputError(f"more than {limit} outcomes; choose a smaller tree or vocabulary, or raise the limit")
        result = run(path)
        if path.made != len(path.tape):
            raise HiddenRandomness("a replay ended before its prescribed choices were used up")
        yield result, path.probability()
        count += 1
        path = path.next()


def outcomes(run: Callable[[Branches], K], limit: int = 20_000, shared: bool = False) -> dict[K, float]:
    """The distribution of what `run` returns."""
    probs: dict[K, float] = {}
    for result, probability in branches(run, limit, shared):
        probs[result] = probs.get(result, 0.0) + probability
    return probs
