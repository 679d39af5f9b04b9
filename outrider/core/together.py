"""Several constraints of one request as one: reshaping ones one after the other, automata side by side.

A token may follow where every automaton lets it. Exact; costs the sum of what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.core.protocols import AnyConstraint, Automaton, Bound, CompileForm, Constraint, Constraints, Predicate


@dataclass(frozen=True, slots=True)
class Chain:
    """Each reshapes what the one before it left."""

    links: Sequence[Constraint]

    def reshape(self, tokens: NDArray[np.int64], logits: Tensor) -> Tensor:
        for link in self.links:
            logits = link.reshape(tokens, logits).float()
        return logits


@dataclass(frozen=True, slots=True)
class Both:
    """What both automata allow; a state is a pair of theirs."""

    first: Automaton
    second: Automaton

    def start(self, prompt: Sequence[int]) -> Any:
        return self.first.start(prompt), self.second.start(prompt)

    def advance(self, state: Any, token: int) -> Any:
        pair = self.first.advance(state[0], token), self.second.advance(state[1], token)
        return None if pair[0] is None or pair[1] is None else pair

    def mask(self, states: Sequence[Any]) -> NDArray[np.int32]:
        return self.first.mask([first for first, _ in states]) & self.second.mask([second for _, second in states])

    def allows(self, state: Any, token: int) -> bool:
        return self.first.allows(state[0], token) and self.second.allows(state[1], token)

    def forced(self, state: Any) -> Sequence[int]:
        """What one is bound to, as far as the other goes along."""
        legal = []
        for token in self.first.forced(state[0]) or self.second.forced(state[1]):
            if state is None or not self.allows(state, token):
                break
            legal.append(token)
            state = self.advance(state, token)
        return legal

    def complete(self, state: Any) -> bool:
        return self.first.complete(state[0]) and self.second.complete(state[1])


def as_list(given: Constraints | None) -> list[AnyConstraint]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [cast("AnyConstraint", given)]


def split(given: Constraints | None) -> tuple[Constraint | None, Automaton | None]:
    """What reshapes, and what has a state."""
    items = as_list(given)
    automata = [item for item in items if isinstance(item, Automaton)]
    reshaping = [item for item in items if isinstance(item, Constraint)]
    for item in items:
        if not isinstance(item, Automaton | Constraint | Bound | Predicate):
            raise InputError(
                f"constraint is of type {type(item).__name__}; give a grammar of outrider.constrain, a style, or a list"
            )
    chained: Constraint | None = reshaping[0] if len(reshaping) == 1 else Chain(reshaping) if reshaping else None
    return chained, reduce(Both, automata) if automata else None


def with_form(params: SamplingParams, given: Constraints | None, make: CompileForm | None) -> Constraints | None:
    """What was given, and the automaton of the form that the parameters ask for."""
    if not params.form:
        return given
    if make is None:
        raise InputError(f"{params.form} needs a tokenizer; load the model with its tokenizer")
    return [make(params), *as_list(given)]


def acting_late(given: Constraints | None) -> tuple[Bound | None, Predicate | None]:
    """What acts on what the others leave; a request may have one of each kind."""
    items = as_list(given)
    bounds = [item for item in items if isinstance(item, Bound)]
    predicates = [item for item in items if isinstance(item, Predicate)]
    if len(bounds) > 1 or len(predicates) > 1:
        raise InputError("constraint has two bounds or two predicates; give one of a kind")
    return bounds[0] if bounds else None, predicates[0] if predicates else None
