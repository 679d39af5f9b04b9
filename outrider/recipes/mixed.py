"""Mixtures: the drafters of several methods in one tree. `mix` as it is by default is what users get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from outrider import methods
from outrider.errors import InputError
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.protocols import Budget, Controller, Drafter, Even, Pads, Recipe
from outrider.recipes.common import (
    AUTO,
    LEAST_BYTES,
    Candidates,
    VerifierName,
    budget_option,
    check_store,
    controller,
    cost_curve,
    told_if_slow,
    verifier,
    wide_steps,
)
from outrider.tree import Law

MODEL_FREE = "suffix,token-recycling,predicted"
TRAINED = "suffix,predicted,eagle3"  # in small trees a table of likely successors adds nothing to these but time
WIDE = f"{MODEL_FREE},eagle3"  # on a GPU trees have room for one
SOME, MANY = 32, 63  # candidates; with the pending token the second fills a step of 64 rows
DEAR = ("feature",)  # families whose candidates are point masses too, but cost a network's time


@dataclass(frozen=True, slots=True)
class MixOptions(Options):
    parts: str = option(
        AUTO,
        f"methods whose candidates are merged, by name; auto: {MODEL_FREE}; where a drafter is shipped {TRAINED}, "
        f"on a GPU {WIDE}",
    )
    store: str = option("", "a store made by `outrider index build`, to draft from as well")
    budget: Candidates = budget_option(
        AUTO, f"most candidates a step; auto: {MANY} on a GPU, where wide steps cost little, else {SOME}"
    )
    depth: int = option(16, "how deep a tree may be", least=1)
    size: Literal["cost", "budget"] = option("cost", "cost: as many candidates as pay; budget: always all of them")
    combine: Literal["merge", "route"] = option("merge", "merge: all candidates in one tree; route: the surest tree")
    memory_bytes: int = option(64 << 20, "memory of all parts together", least=LEAST_BYTES)
    scope: Literal["shared", "private"] = option("shared", "private: nothing is learnt across requests")
    verifier: VerifierName = option("invariant", "acceptance rule; a coupled one lets parts draw that can")

    def check(self) -> None:
        names = _names(MODEL_FREE if self.parts == AUTO else self.parts, self)
        if not names or {"mix", "plain"} & {*names} or len(set(names)) < len(names):
            raise InputError(f"option parts is {self.parts!r}; name different methods that draft, such as {MODEL_FREE}")
        _check_rule(self, any(_draws(name, self) for name in names))
        for name in names:
            try:
                methods.parse_options(methods.find(name), _shared(name, self, len(names)))
            except InputError as error:
                raise InputError(f"part {name}: {error}") from error


def _mix(parts: Parts, options: MixOptions) -> Recipe:
    from outrider.draft.mix import Mix
    from outrider.draft.rehearsal import rehearse

    wide = wide_steps(parts)
    nodes = options.budget if isinstance(options.budget, int) else MANY if wide else SOME
    options = dataclasses.replace(options, budget=nodes)
    names = _names(_default(parts, wide) if options.parts == AUTO else options.parts, options)
    ranked, dear, drawn = _sorted(parts, names, options)
    _check_rule(options, bool(drawn))
    rule = verifier(options.verifier)
    mix = Mix([*ranked, *dear], drawn, len(dear), combine=options.combine)
    with told_if_slow("getting ready for this machine: compiling drafters and timing the model; this happens once"):
        if ranked:
            rehearse(Mix(ranked, dear=1, seconds=lambda _, most: np.ones(most + 1)), parts.target.vocab_size)
        return Recipe("mix", mix, rule, _sized(parts, mix, options, nodes))


def _default(parts: Parts, wide: bool) -> str:
    from outrider.models.drafts import shipped_draft

    if shipped_draft(parts.loaded, "eagle3") is None:
        return MODEL_FREE
    return WIDE if wide else TRAINED


def _names(listed: str, options: MixOptions) -> list[str]:
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return names + (["retrieval"] if options.store and "retrieval" not in names else [])


def _draws(name: str, options: MixOptions) -> bool:
    family = methods.find(name).family
    return family == "model" or (family in DEAR and options.verifier != "invariant")


def _check_rule(options: MixOptions, drawn: bool) -> None:
    if drawn and Law.MIXED not in verifier(options.verifier).honours:
        raise InputError(
            f"option verifier is {options.verifier!r}, which takes no sampled and chosen candidates in one tree; "
            "use invariant, recursive, naive or traversal, or leave out the parts that draw"
        )


def _places(options: MixOptions) -> None:
    check_store(options.store)
    for name in () if options.parts == AUTO else _names(options.parts, options):
        methods.check(name, _shared(name, options, 1))


def _sorted(
    parts: Parts, names: Sequence[str], options: MixOptions
) -> tuple[list[Drafter], list[Drafter], list[Drafter]]:
    """Drafters of point masses, those of them that are dear, and those that draw."""
    ranked: list[Drafter] = []
    dear: list[Drafter] = []
    drawn: list[Drafter] = []
    for name in names:
        costly = methods.find(name).family in DEAR
        group = drawn if _draws(name, options) else dear if costly else ranked
        group.append(_part(parts, name, options, len(names)))
    return ranked, dear, drawn


def _sized(parts: Parts, mix: Any, options: MixOptions, nodes: int) -> Controller:
    if options.size == "budget":
        return controller("fixed", nodes, options.depth)
    from outrider.control.open import Open
    from outrider.control.step_cost import StepCost

    cost = StepCost(_curve(parts), parts.target.width if isinstance(parts.target, Pads) else None)
    mix.seconds = cost.seconds
    even = isinstance(parts.target, Even) and parts.target.even
    return Open(Budget(nodes, options.depth), cost.add, even)


def _curve(parts: Parts) -> Callable[[int], float]:
    """Where nothing can be measured now, because all slots are busy, every size is tried and learnt from."""
    try:
        return cost_curve(parts).seconds
    except InputError:
        return lambda rows: 1.0


def _part(parts: Parts, name: str, options: MixOptions, count: int) -> Drafter:
    drafter = methods.build(name, parts, _shared(name, options, count)).drafter
    if drafter is None:
        raise InputError(f"option parts names {name!r}, which drafts nothing; leave it out")
    return drafter


def _shared(name: str, options: MixOptions, count: int) -> Mapping[str, Any]:
    """Those of our options that the method knows; the memory is shared by so many."""
    known = {field.name for field in dataclasses.fields(methods.find(name).options)}
    ours: dict[str, Any] = {
        "store": options.store, "memory_bytes": options.memory_bytes // count, "scope": options.scope,
        "verifier": options.verifier, "budget": SOME if options.budget == AUTO else options.budget,
    }  # fmt: skip
    return {key: value for key, value in ours.items() if key in known}


RECIPES = (
    MethodInfo(
        "mix", "several drafters' candidates in one tree, as many as pay",
        "merged trees after TAPS arXiv 2603.27027", "mixture", True, "nothing",
        MixOptions, _mix, "draft/mix.py", _places,
    ),
)  # fmt: skip
