"""Mixtures: the drafters of several methods in one tree. `mix` as it is by default is what users get."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider import methods
from outrider.errors import InputError
from outrider.methods import MethodInfo, Parts, option
from outrider.protocols import Budget, Drafter, Part, Recipe, Role
from outrider.recipes.common import VerifierName, at_least, cost_model, told_if_compiling, verifier, wide_steps
from outrider.recipes.trained import kind_of
from outrider.tree import Law

MODEL_FREE = "suffix,token-recycling,predicted"
BESIDE = "suffix,predicted"  # a trained drafter: in small trees a table of likely successors adds nothing but time
SOME, MANY = 32, 63  # candidates; with the pending token the second fills a step of 64 rows
ORDER = (Role.FREE, Role.LOOKS, Role.RUNS, Role.DRAWS)  # in which parts are asked: the expensive know what others found


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
    draft: str = option("", "a smaller model to draft with as well: hub id, folder or .gguf")
    store: str = option("", "a store made by `outrider index build`, to draft from as well")
    budget: int = option(0, f"most candidates a step; 0: {MANY} on a GPU, where wide steps cost little, else {SOME}")
    depth: int = option(16, "how deep a tree may be")
    size: Literal["cost", "budget"] = option("cost", "cost: as many candidates as pay; budget: always all of them")
    combine: Literal["merge", "route"] = option("merge", "merge: all candidates in one tree; route: the surest tree")
    memory_bytes: int = option(64 << 20, "memory of all parts together")
    scope: Literal["shared", "private"] = option("shared", "private: nothing is learnt across requests")
    verifier: VerifierName = option("invariant", "acceptance rule; a coupled one lets parts draw that can")


def _mix(parts: Parts, options: MixOptions) -> Recipe:
    from outrider.control.goodput import Goodput
    from outrider.draft.mix import Mix
    from outrider.draft.rehearsal import rehearse

    at_least("budget", options.budget, 0)
    at_least("depth", options.depth, 1)
    wide = wide_steps(parts)
    options = dataclasses.replace(options, budget=options.budget or (MANY if wide else SOME))
    members = _members(parts, _names(parts, options, wide), options)
    rule = verifier(options.verifier)
    if any(part.role is Role.DRAWS for part in members) and Law.MIXED not in rule.honours:
        raise InputError(
            f"option verifier is {options.verifier!r}, which takes no sampled and chosen candidates in one tree; "
            "use invariant, recursive, naive or traversal, or leave out the parts that draw"
        )
    costs = cost_model(parts) if options.size == "cost" else None
    roles, names = [part.role for part in members], tuple(part.drafter.name for part in members)
    limit = Budget(options.budget, options.depth)
    control = Goodput(limit, roles, costs, names, even=parts.target.traits.even, combine=options.combine)
    if quick := [part.drafter for part in members if part.role in (Role.FREE, Role.LOOKS)]:
        with told_if_compiling("drafters"):
            kinds = [Role.LOOKS, *[Role.FREE] * len(quick[2:]), Role.RUNS][-len(quick) :]  # every kind of decision
            trial = Goodput(limit, kinds, costs)
            rehearsed = Mix([Part(own, role) for own, role in zip(quick, kinds, strict=True)], trial)
            rehearse(rehearsed, parts.target.vocab_size, trial)
    return Recipe("mix", Mix(members, control), rule, control, costs=costs)


def _names(parts: Parts, options: MixOptions, wide: bool) -> list[str]:
    kind = kind_of(parts, options.drafter)
    listed = _default(kind, wide) if options.parts == "auto" else options.parts
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for given, name in ((options.store, "retrieval"), (options.draft, "draft-model")):
        names += [name] if given and name not in names else []
    if not names or "mix" in names or len(set(names)) < len(names):
        raise InputError(f"option parts is {options.parts!r}; name different methods, such as {MODEL_FREE}")
    if options.drafter and kind not in names:
        raise InputError(f"option drafter names one of kind {kind}, which is not in option parts ({options.parts})")
    return names


def _default(kind: str, wide: bool) -> str:
    """On a GPU trees have room for a table of successors beside a trained drafter."""
    return f"{MODEL_FREE if wide else BESIDE},{kind}" if kind else MODEL_FREE


def _members(parts: Parts, names: Sequence[str], options: MixOptions) -> list[Part]:
    """In the order in which they are asked."""
    members = []
    for name in names:
        info = methods.find(name)
        draws = info.samples and options.verifier != "invariant"
        members.append(Part(_drafter(parts, info, options, len(names)), Role.DRAWS if draws else info.role))
    return sorted(members, key=lambda part: ORDER.index(part.role))


def _drafter(parts: Parts, info: MethodInfo, options: MixOptions, count: int) -> Drafter:
    """The drafter of a method, with those of our options that it knows."""
    known = {field.name for field in dataclasses.fields(info.options)}
    ours: dict[str, Any] = {
        "store": options.store, "draft": options.draft, "memory_bytes": options.memory_bytes // count,
        "scope": options.scope, "verifier": options.verifier, "budget": options.budget,
        "drafter": options.drafter if options.drafter and info.name == kind_of(parts, options.drafter) else "",
    }  # fmt: skip
    if info.role is Role.LOOKS:  # the target would have to score the prompt's rows, whatever that brings
        ours["learn_prompt"] = False
    drafter = methods.build(info.name, parts, {key: value for key, value in ours.items() if key in known}).drafter
    if drafter is None:
        raise InputError(f"option parts names {info.name!r}, which drafts nothing; leave it out")
    return drafter


RECIPES = (
    MethodInfo(
        "mix", "several drafters' candidates in one tree, as many as pay",
        "merged trees after TAPS arXiv 2603.27027", "mixture", True, "nothing",
        MixOptions, _mix, "draft/mix.py",
    ),
)  # fmt: skip
