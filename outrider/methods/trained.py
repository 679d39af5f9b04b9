"""Methods whose drafter is a small network trained on the target's hidden states: one row a family, one way to build.

Without a drafter named, the user's newest for this target is used, else the one that comes with the package; where
there is none, the method is refused with the commands that train one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from outrider.core.errors import InputError
from outrider.core.protocols import Grower, Recipe, Source
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    AUTO,
    CONTROLLER_HELP,
    Candidates,
    ControllerName,
    VerifierName,
    budget_option,
    check_drafter,
    controller,
    cost_curve,
    embedding,
    told_if_compiling,
    told_if_slow,
    verifier,
    wide_steps,
)

if TYPE_CHECKING:
    from outrider.draft.grown import Grown
    from outrider.runtime.layers.choice import Drivers

# Candidates: several at each depth where rows cost little, else one, so that `payoff` can choose small trees.
SOME, MANY = 6, 24


@dataclass(frozen=True, slots=True)
class TrainedOptions(Options):
    drafter: str = option(
        "", "a folder made by `outrider train run` or a name in `outrider drafters list`; empty: the target's newest"
    )
    budget: Candidates = budget_option(AUTO, f"most candidates a step; auto: {MANY} on a GPU, else {SOME}")
    depth: int = option(6, "how deep a tree may be", least=1)
    grower: Literal["auto", "topk", "dyspec", "cost-aware", "chain"] = option(
        "auto", "how the tree grows; auto: topk where nothing is drawn, else dyspec"
    )
    beam: int = option(10, "topk: nodes expanded at each depth", least=1)
    width: int = option(64, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")

    @property
    def branch(self) -> int:
        """topk: children of a node that is expanded."""
        return max(self.beam, 10)


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of network that drafts: `models/trained.py` loads it under the same name."""

    name: str
    summary: str
    paper: str
    file: str  # where the idea is
    heads: Callable[[], type[Source]] | None = None  # the source over independent heads; None: over one layer
    needs: str = "a trained drafter (outrider train run)"


def _medusa() -> Any:
    from outrider.draft.feature.medusa import MedusaSource

    return MedusaSource


def _hydra() -> Any:
    from outrider.draft.feature.hydra import HydraSource

    return HydraSource


FAMILIES = {
    family.name: family
    for family in (
        Family("eagle3", "one trained layer goes on from the target's hidden states; a dynamic tree",
               "arXiv 2503.01840; arXiv 2406.16858", "draft/feature/eagle3.py",
               needs="a trained drafter (shipped for smollm2)"),
        Family("eagle2",
               "one trained layer guesses the target's next top feature, read by its own head; a dynamic tree",
               "arXiv 2406.16858; arXiv 2401.15077", "models/networks/eagle2.py"),
        Family("fspad", "eagle2 with features sampled by the drawn token and logits freed from the guess",
               "arXiv 2408.15562", "models/networks/fspad.py"),
        Family("medusa", "trained heads each guess one token further ahead from the target's last feature",
               "arXiv 2401.10774", "draft/feature/medusa.py", heads=_medusa),
        Family("hydra", "trained heads, each told the tokens drafted before it", "arXiv 2402.05109",
               "draft/feature/hydra.py", heads=_hydra),
    )
}  # fmt: skip
KINDS = tuple(FAMILIES)


def kind_of(parts: Parts, named: str) -> str:
    """Of the drafter that is named, else the first kind of which the target has one; empty where there is none."""
    from outrider.models.kept import find_drafter

    if named:
        return kind_of_folder(named)
    return next((kind for kind in KINDS if find_drafter(parts.loaded, kind) is not None), "")


def kind_of_folder(named: str) -> str:
    """Of the drafter in this folder, or kept under this name."""
    from outrider.models.drafts import read_card
    from outrider.models.kept import named_folder

    kind = read_card(named_folder(named)).kind
    if kind not in KINDS:
        raise InputError(f"option drafter is {named!r}, a drafter of kind {kind}; use one of {', '.join(KINDS)}")
    return kind


def _build(family: Family, parts: Parts, options: TrainedOptions) -> Recipe:
    from outrider.models.trained import drafter_of

    nodes = options.budget if isinstance(options.budget, int) else MANY if wide_steps(parts) else SOME
    net = drafter_of(parts.loaded, family.name, options.drafter, parts.drafts)
    deepest = getattr(net, "deepest", max(nodes, options.depth))  # heads: one a depth
    depth = min(nodes if options.grower == "chain" else options.depth, deepest)
    budget = controller(options.controller, min(nodes, depth) if options.grower == "chain" else nodes, depth)
    grower = _grower(parts, options, depth)
    drafter = _drafter(family, parts, options, net, grower, depth)
    return Recipe(family.name, drafter, verifier(options.verifier), budget)


def _drafter(
    family: Family, parts: Parts, options: TrainedOptions, net: Any, grower: Grower, depth: int
) -> Grown:  # fmt: skip
    from outrider.draft.feature.eagle3 import Eagle3Source
    from outrider.draft.feature.recorded import Recorded
    from outrider.draft.grown import Grown
    from outrider.runtime.layers.choice import eight_bits

    sampled, beside = options.verifier != "invariant", parts.target.traits.other_threads
    if family.heads is not None:
        embed = embedding(parts.target, parts.loaded)
        source = family.heads()(net, embed, width=options.width, active=eight_bits(net).active)  # type: ignore[call-arg]
        return Grown(source, grower, sampled, beside=beside)
    drivers = _drivers(parts, family.name, options.drafter, net)
    layered = Eagle3Source(drivers.driver, width=options.width, name=family.name)
    make = None
    if options.grower in ("auto", "topk"):
        branch = min(options.branch, options.width)
        make = drivers.recorder(parts.target, beam=options.beam, branch=branch, depth=depth)
    if make is None:
        return Grown(layered, grower, sampled, beside=beside)
    drafter = Recorded(layered, grower, sampled, make=make, depth=depth, always=options.grower == "topk")
    with told_if_slow("recording what the drafter does"):
        drafter.prepare(parts.target.traits.slots)
    return drafter


def layered_source(parts: Parts, kind: str, named: str, width: int) -> Source:
    """The distributions of a one-layer drafter, for any grower."""
    from outrider.draft.feature.eagle3 import Eagle3Source
    from outrider.models.trained import drafter_of

    net = drafter_of(parts.loaded, kind, named, parts.drafts)
    return Eagle3Source(_drivers(parts, kind, named, net).driver, width=width, name=kind)


def _drivers(parts: Parts, kind: str, named: str, net: Any) -> Drivers:
    """Made once for all methods that draft with this network."""
    from outrider.runtime.layers.choice import Drivers, layer_driver

    key = ("drivers", kind, named)
    if key not in parts.drafts or parts.drafts[key].net is not net:
        embed = embedding(parts.target, parts.loaded)
        with told_if_compiling("the drafter"):
            driver = layer_driver(net, embed, beside=parts.target.traits.other_threads)
        parts.drafts[key] = Drivers(net, driver)
    return parts.drafts[key]


def _grower(parts: Parts, options: TrainedOptions, depth: int) -> Grower:
    if options.grower == "chain":
        from outrider.grow.chain import Chain

        return Chain()
    if options.grower == "dyspec":
        from outrider.grow.dyspec import Threshold

        return Threshold(depth)
    if options.grower == "cost-aware":
        from outrider.grow.cost_aware import CostAware

        return CostAware(cost_curve(parts).seconds, length=parts.target.length, depth=depth)
    from outrider.grow.dyspec import Threshold
    from outrider.grow.either import Either
    from outrider.grow.topk import TopK

    ranked = TopK(beam=options.beam, branch=options.branch, depth=depth)
    return ranked if options.grower == "topk" else Either(ranked, Threshold(depth))


def _method(family: Family) -> MethodInfo:
    return MethodInfo(
        family.name, family.summary, family.paper, "feature", True, family.needs, TrainedOptions,
        partial(_build, family), family.file, lambda options: check_drafter(family.name, options.drafter),
        role=Role.RUNS, samples=True,
    )  # fmt: skip


RECIPES = tuple(_method(family) for family in FAMILIES.values())
