"""Rounds of samples under a bound that learns: what one round saw, the next one draws by.

Each sample of a round is drawn from the same distribution, that of the bounds before the round. Paper: grammar-aligned
decoding (arXiv 2405.21047). Cost: that of the samples; a sample that runs into a dead end is told to the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outrider.core.errors import EmptySupport, InputError
from outrider.core.generation import Generation
from outrider.core.noise import MASK, fresh_seed
from outrider.core.params import SamplingParams
from outrider.core.protocols import AnyConstraint, Bound
from outrider.search.submits import Submits, settled

STILL = 1e-3  # a bound that falls by less than this share has not moved


class Learns(Bound, Protocol):
    """A bound that changes between rounds."""

    @property
    def bound(self) -> float: ...
    def dead(self, output: Sequence[int]) -> None: ...
    def settle(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave; `bound` is on the chance that the model alone says something legal, after the round."""

    number: int
    generations: list[Generation]
    dead_ends: int
    bound: float


def rounds(
    engine: Submits, prompt: Any, params: SamplingParams, grammar: Sequence[AnyConstraint], learner: Learns,
    count: int, patience: int = 0,
) -> Iterator[Round]:  # fmt: skip
    """Up to `count` rounds of `params.n` samples each; changes the learner.

    With `patience` it ends after so many rounds in which the bound did not move. A seed repeats all rounds.
    """
    if count < 1 or patience < 0:
        raise InputError(f"{count} rounds with patience {patience}: ask for at least one round, and patience from 0")
    seed = fresh_seed() if params.seed is None else params.seed
    still = 0
    for number in range(count):
        before = learner.bound
        handle = engine.submit(prompt, replace(params, seed=seed + number & MASK), constraint=[*grammar, learner])
        generations, dead = settled(engine, handle)
        for output in dead:
            learner.dead(output)
        bound = learner.settle()
        yield Round(number, generations, len(dead), bound)
        if bound == 0:
            raise EmptySupport("the model gives no probability to any text of this grammar: loosen it")
        still = still + 1 if bound > before * (1 - STILL) else 0
        if patience and still >= patience:
            return
