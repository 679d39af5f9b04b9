"""Mixtures: the drafters of several methods in one tree. `mix` as it is by default is what users get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from outrider import methods
from outrider.errors import InputError
from outrider.methods import MethodInfo, Parts, option
from outrider.protocols import Budget, Controller, Drafter, Even, Pads, Recipe
from outrider.recipes.common import VerifierName, at_least, controller, cost_curve, told_if_slow, verifier, wide_steps
from outrider.recipes.trained import kind_of
from outrider.tree import Law

MODEL_FREE = "suffix,token-recycling,predicted"
BESIDE = "suffix,predicted"  # a trained drafter: in small trees a table of likely successors adds nothing but time
SOME, MANY = 32, 63  # candidates; with the pending token the second fills a step of 64 rows
DEAR = ("feature",)  # families whose candidates are point masses too, but cost a network's time


@dataclass(frozen=True, slots=True)
class MixOptions:
    parts: str = option(
        "auto",
        f"methods whose candidates are merged, by name; auto: {MODEL_FREE}; where the target has a trained drafter, "
        f"that and on a GPU all of these, else {BESIDE}",
    )
    drafter: str = option(
        "", "a trained drafter: its folder or a name in `outrider drafters list`; empty: the target's newest, or none"
    )
    store: str = option("", "a store made by `outrider index build`, to draft from as well")
    budget: int = option(0, f"most candidates a step; 0: {MANY} on a GPU, where wide steps cost little, else {SOME}")
    depth: int = option(16, "how deep a tree may be")
    size: Literal["cost", "budget"] = option("cost", "cost: as many candidates as pay; budget: always all of them")
    combine: Literal["merge", "route"] = option("merge", "merge: all candidates in one tree; route: the surest tree")
    memory_bytes: int = option(64 << 20, "memory of all parts together")
    scope: Literal["shared", "private"] = option("shared", "private: nothing is learnt across requests")
    verifier: VerifierName = option("invariant", "acceptance rule; a coupled one lets parts draw that can")


def _mix(parts: Parts, options: MixOptions) -> Recipe:
    from outrider.draft.mix import Mix
    from outrider.draft.rehearsal import rehearse

    at_least("budget", options.budget, 0)
    at_least("depth", options.depth, 1)
    wide = wide_steps(parts)
    options = dataclasses.replace(options, budget=options.budget or (MANY if wide else SOME))
    kind = kind_of(parts, options.drafter)
    listed = _default(kind, wide) if options.parts == "auto" else options.parts
    names = [name.strip() for name in listed.split(",") if name.strip()]
    names += ["retrieval"] if options.store and "retrieval" not in names else []
    if not names or "mix" in names or len(set(names)) < len(names):
        raise InputError(f"option parts is {options.parts!r}; name different methods, such as {MODEL_FREE}")
    if options.drafter and kind not in names:
        raise InputError(f"option drafter names one of kind {kind}, which is not in option parts ({options.parts})")
    ranked, dear, drawn = _sorted(parts, names, options)
    rule = verifier(options.verifier)
    if drawn and Law.MIXED not in rule.honours:
        raise InputError(
            f"option verifier is {options.verifier!r}, which takes no sampled and chosen candidates in one tree; "
            "use invariant, recursive, naive or traversal, or leave out the parts that draw"
        )
    mix = Mix([*ranked, *dear], drawn, len(dear), combine=options.combine)
    with told_if_slow("getting ready for this machine: compiling drafters and timing the model; this happens once"):
        if ranked:
            rehearse(Mix(ranked, dear=1, seconds=lambda _, most: np.ones(most + 1)), parts.target.vocab_size)
        return Recipe("mix", mix, rule, _sized(parts, mix, options))


def _default(kind: str, wide: bool) -> str:
    """On a GPU trees have room for a table of successors beside a trained drafter."""
    return f"{MODEL_FREE if wide else BESIDE},{kind}" if kind else MODEL_FREE


def _sorted(
    parts: Parts, names: Sequence[str], options: MixOptions
) -> tuple[list[Drafter], list[Drafter], list[Drafter]]:
    """Drafters of point masses, those of them that are dear, and those that draw."""
    ranked: list[Drafter] = []
    dear: list[Drafter] = []
    drawn: list[Drafter] = []
    for name in names:
        family = methods.find(name).family
        draws = family == "model" or (family in DEAR and options.verifier != "invariant")
        group = drawn if draws else dear if family in DEAR else ranked
        group.append(_part(parts, name, options, len(names)))
    return ranked, dear, drawn


def _sized(parts: Parts, mix: Any, options: MixOptions) -> Controller:
    if options.size == "budget":
        return controller("fixed", options.budget, options.depth)
    from outrider.control.open import Open
    from outrider.control.step_cost import StepCost

    cost = StepCost(_curve(parts), parts.target.width if isinstance(parts.target, Pads) else None)
    mix.seconds = cost.seconds
    even = isinstance(parts.target, Even) and parts.target.even
    return Open(Budget(options.budget, options.depth), cost.add, even)


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
        "drafter": options.drafter if options.drafter and name == kind_of(parts, options.drafter) else "",
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
