"""Mixtures: the drafters of several methods in one tree. `mix` as it is by default is what users get."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider import methods
from outrider.core.errors import InputError
from outrider.core.protocols import Drafter, HasSideRows, Part, Recipe
from outrider.core.records import Budget, Role
from outrider.core.tree import Law
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    AUTO,
    LEAST_BYTES,
    Candidates,
    VerifierName,
    budget_option,
    check_draft,
    check_store,
    cost_model,
    told_if_compiling,
    verifier,
    wide_steps,
)
from outrider.methods.trained import kind_of, kind_of_folder

MODEL_FREE = "suffix,token-recycling,predicted,jump-forward"
BESIDE = "suffix,predicted,jump-forward"  # besides a trained drafter, with which a table of successors only adds time
CPU_BUDGET, GPU_BUDGET = 32, 63  # candidates; with the pending token the second fills a step of 64 rows
ORDER = (Role.FREE, Role.LOOKS, Role.RUNS, Role.DRAWS)  # parts are asked from cheap to expensive; those that draw last


@dataclass(frozen=True, slots=True)
class MixOptions(Options):
    parts: str = option(
        AUTO,
        f"methods whose candidates are merged, by name; auto: {MODEL_FREE}; where the target has a trained drafter, "
        f"{BESIDE} and that one",
    )
    drafter: str = option(
        "", "a trained drafter: its folder or a name in `outrider drafters list`; empty: the target's newest, or none"
    )
    draft: str = option("", "a smaller model to draft with as well: hub id, folder or .gguf")
    store: str = option("", "a store made by `outrider index build`, to draft from as well")
    budget: Candidates = budget_option(
        AUTO, f"most candidates a step; auto: {GPU_BUDGET} on a GPU, where wide steps cost little, else {CPU_BUDGET}"
    )
    depth: int = option(32, "how deep a tree may be", least=1)
    size: Literal["cost", "budget"] = option("cost", "cost: as many candidates as pay; budget: always all of them")
    combine: Literal["merge", "route"] = option("merge", "merge: all candidates in one tree; route: the surest tree")
    memory_bytes: int = option(64 << 20, "memory of all parts together", least=LEAST_BYTES)
    scope: Literal["shared", "private"] = option("shared", "private: nothing is learnt across requests")
    verifier: VerifierName = option("invariant", "acceptance rule; a coupled one lets parts draw that can")

    def check(self) -> None:
        names = _names(MODEL_FREE if self.parts == AUTO else self.parts, self)
        if not names or {"mix", "plain"} & {*names} or len(set(names)) < len(names):
            raise InputError(f"option parts is {self.parts!r}; name different methods that draft, such as {MODEL_FREE}")
        _check_rule(self, any(_role(methods.find(name), self) is Role.DRAWS for name in names))
        for name in names:
            try:
                methods.parse_options(methods.find(name), _shared(methods.find(name), self, len(names)))
            except InputError as error:
                raise InputError(f"part {name}: {error}") from error


def _mix(parts: Parts, options: MixOptions) -> Recipe:
    from outrider.control.goodput import Goodput
    from outrider.draft.mix import Mix
    from outrider.draft.rehearsal import rehearse

    nodes = options.budget if isinstance(options.budget, int) else GPU_BUDGET if wide_steps(parts) else CPU_BUDGET
    options = dataclasses.replace(options, budget=nodes)
    kind = kind_of(parts, options.drafter)
    names = _names(_default(kind) if options.parts == AUTO else options.parts, options)
    if options.drafter and kind not in names:
        raise InputError(f"option drafter names one of kind {kind}, which is not in option parts ({options.parts})")
    members = _members(parts, names, options, kind)
    roles = [part.role for part in members]
    _check_rule(options, Role.DRAWS in roles)
    costs = cost_model(parts) if options.size == "cost" else None
    control = Goodput(
        Budget(nodes, options.depth), roles, costs, tuple(part.drafter.name for part in members),
        even=parts.target.traits.even, combine=options.combine,
    )  # fmt: skip
    if quick := [part.drafter for part in members if part.role in (Role.FREE, Role.LOOKS)]:
        with told_if_compiling("drafters"):
            kinds = [Role.LOOKS, *[Role.FREE] * len(quick[2:]), Role.RUNS][-len(quick) :]  # every kind of decision
            trial = Goodput(control.limit, kinds, costs)
            rehearsed = Mix([Part(drafter, role) for drafter, role in zip(quick, kinds, strict=True)], trial)
            rehearse(rehearsed, parts.target.vocab_size, trial)
    return Recipe("mix", Mix(members, control), verifier(options.verifier), control, costs=costs)


def _default(kind: str) -> str:
    return f"{BESIDE},{kind}" if kind else MODEL_FREE


def _names(listed: str, options: MixOptions) -> list[str]:
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for given, name in ((options.store, "retrieval"), (options.draft, "draft-model")):
        names += [name] if given and name not in names else []
    return names


def _role(info: MethodInfo, options: MixOptions) -> Role:
    return Role.DRAWS if info.samples and options.verifier != "invariant" else info.role


def _check_rule(options: MixOptions, drawn: bool) -> None:
    if drawn and Law.MIXED not in verifier(options.verifier).honours:
        raise InputError(
            f"option verifier is {options.verifier!r}, which takes no sampled and chosen candidates in one tree; "
            "use invariant, recursive, naive or traversal, or leave out the parts that draw"
        )


def _places(options: MixOptions) -> None:
    check_store(options.store)
    check_draft(options.draft)
    if options.drafter:
        kind_of_folder(options.drafter)
    for name in () if options.parts == AUTO else _names(options.parts, options):
        methods.check(name, _shared(methods.find(name), options, 1))


def _members(parts: Parts, names: Sequence[str], options: MixOptions, kind: str) -> list[Part]:
    """In the order in which they are asked; `kind` is that of the trained drafter, if there is one."""
    members = []
    for name in names:
        info = methods.find(name)
        shared = dict(_shared(info, options, len(names)))
        if options.drafter and name == kind:
            shared["drafter"] = options.drafter
        members.append(Part(_drafter(parts, info, shared), _role(info, options)))
    return sorted(members, key=lambda part: ORDER.index(part.role))


def _drafter(parts: Parts, info: MethodInfo, options: Mapping[str, Any]) -> Drafter:
    drafter = methods.build(info.name, parts, options).drafter
    if drafter is None:
        raise InputError(f"option parts names {info.name!r}, which drafts nothing; leave it out")
    if isinstance(drafter, HasSideRows):
        why = "whose rows beside the candidates a mixture does not run; use it alone"
        raise InputError(f"option parts names {info.name!r}, {why}")
    return drafter


def _shared(info: MethodInfo, options: MixOptions, count: int) -> Mapping[str, Any]:
    """Those of our options that one of so many parts knows."""
    known = {field.name for field in dataclasses.fields(info.options)}
    ours: dict[str, Any] = {
        "store": options.store, "draft": options.draft, "memory_bytes": options.memory_bytes // count,
        "scope": options.scope, "verifier": options.verifier,
        "budget": CPU_BUDGET if options.budget == AUTO else options.budget,
    }  # fmt: skip
    if info.role is Role.LOOKS:  # the target would have to score the prompt's rows, whatever that brings
        ours["learn_prompt"] = False
    return {name: value for name, value in ours.items() if name in known}


RECIPES = (
    MethodInfo(
        "mix", "several drafters' candidates in one tree, as many as pay",
        "merged trees after TAPS arXiv 2603.27027", "mixture", True, "nothing",
        MixOptions, _mix, "draft/mix.py", _places,
    ),
)  # fmt: skip
