"""Mixtures: the drafters of several methods in one tree. `mix` as it is by default is what users get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from outrider import methods
from outrider.errors import InputError
from outrider.methods import MethodInfo, Parts, option
from outrider.protocols import Budget, Controller, Drafter, Recipe
from outrider.recipes.common import VerifierName, at_least, controller, cost_curve, told_if_slow, verifier

MODEL_FREE = "suffix,token-recycling,predicted"


@dataclass(frozen=True, slots=True)
class MixOptions:
    parts: str = option(MODEL_FREE, "methods whose candidates are merged, by name")
    store: str = option("", "a store made by `outrider index build`, to draft from as well")
    budget: int = option(32, "most candidates a step")
    depth: int = option(16, "how deep a tree may be")
    size: Literal["cost", "budget"] = option("cost", "cost: as many candidates as pay; budget: always all of them")
    combine: Literal["merge", "route"] = option("merge", "merge: all candidates in one tree; route: the surest tree")
    memory_bytes: int = option(64 << 20, "memory of all parts together")
    scope: Literal["shared", "private"] = option("shared", "private: nothing is learnt across requests")
    verifier: VerifierName = option("invariant", "acceptance rule; a coupled one lets parts draw that can")


def _mix(parts: Parts, options: MixOptions) -> Recipe:
    from outrider.draft.mix import Mix
    from outrider.draft.rehearsal import rehearse

    at_least("budget", options.budget, 1)
    at_least("depth", options.depth, 1)
    names = [name.strip() for name in options.parts.split(",") if name.strip()]
    names += ["retrieval"] if options.store and "retrieval" not in names else []
    if not names or "mix" in names or len(set(names)) < len(names):
        raise InputError(f"option parts is {options.parts!r}; name different methods, such as {MODEL_FREE}")
    dear = [methods.find(name).family in ("model", "trained") for name in names]
    drafters = [_part(parts, name, options, len(names)) for name in names]
    mix = Mix(
        ranked=[d for d, own in zip(drafters, dear, strict=True) if not own],
        drawn=[d for d, own in zip(drafters, dear, strict=True) if own],
        combine=options.combine,
    )  # fmt: skip
    with told_if_slow("getting ready for this machine: compiling drafters and timing the model; this happens once"):
        rehearse(Mix(mix.ranked), parts.target.vocab_size)
        return Recipe("mix", mix, verifier(options.verifier), _sized(parts, mix, options))


def _sized(parts: Parts, mix: Any, options: MixOptions) -> Controller:
    if options.size == "budget":
        return controller("fixed", options.budget, options.depth)
    from outrider.control.open import Open
    from outrider.control.step_cost import StepCost

    cost = StepCost(_curve(parts))
    mix.seconds = cost.seconds
    return Open(Budget(options.budget, options.depth), cost.add)


def _curve(parts: Parts) -> Callable[[int], float]:
    """Where nothing can be measured now, because all slots are busy, every size is tried and learnt from."""
    try:
        return cost_curve(parts).seconds
    except InputError:
        return lambda rows: 1.0


def _part(parts: Parts, name: str, options: MixOptions, count: int) -> Drafter:
    """The drafter of a method, with those of our options that it knows."""
    info = methods.find(name)
    known = {field.name for field in dataclasses.fields(info.options)}
    ours: dict[str, Any] = {
        "store": options.store, "memory_bytes": options.memory_bytes // count, "scope": options.scope,
        "verifier": options.verifier, "budget": options.budget,
    }  # fmt: skip
    drafter = methods.build(name, parts, {key: value for key, value in ours.items() if key in known}).drafter
    if drafter is None:
        raise InputError(f"option parts names {name!r}, which drafts nothing; leave it out")
    return drafter


RECIPES = (
    MethodInfo(
        "mix", "several drafters' candidates in one tree, as many as pay",
        "merged trees after TAPS arXiv 2603.27027", "mixture", True, "nothing",
        MixOptions, _mix, "draft/mix.py",
    ),
)  # fmt: skip
