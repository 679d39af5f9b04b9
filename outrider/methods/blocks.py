"""Methods whose drafter says a whole block of tokens in one forward pass of a network trained for the target.

Without a drafter named, the user's newest for this target is used; where there is none, the method is refused with the
commands that train one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from outrider.core.errors import InputError
from outrider.core.protocols import Grower, Recipe, Source
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    AUTO,
    CONTROLLER_HELP,
    LEAST_BYTES,
    Candidates,
    ControllerName,
    VerifierName,
    budget_option,
    check_drafter,
    controller,
    cost_curve,
    embedding,
    told_if_compiling,
    verifier,
    wide_steps,
)
from outrider.methods.tables import SCOPE_HELP
from outrider.methods.trained import MANY, SOME, TrainedOptions

MakeSource = Callable[[Parts, Any, int], Source]  # over a network, with rows of so many tokens


@dataclass(frozen=True, slots=True)
class BlockOptions(Options):
    drafter: str = option("", TrainedOptions.__dataclass_fields__["drafter"].metadata["help"])
    budget: Candidates = budget_option(AUTO, f"most candidates a step; auto: {MANY} on a GPU, else {SOME}")
    depth: int = option(16, "how deep a tree may be, if the block is as long", least=1)
    grower: Literal["auto", "best-first", "dyspec", "chain"] = option(
        "auto", "how the tree grows; auto: best-first where nothing is drawn, else dyspec"
    )
    width: int = option(64, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")


def grown(name: str, kind: str, make: MakeSource, parts: Parts, options: BlockOptions) -> Recipe:
    """A method over a trained drafter of this kind."""
    from outrider.draft.grown import Grown
    from outrider.models.trained import drafter_of

    nodes = options.budget if isinstance(options.budget, int) else MANY if wide_steps(parts) else SOME
    net = drafter_of(parts.loaded, kind, options.drafter, parts.drafts)
    depth = min(options.depth, net.deepest, nodes)
    budget = controller(options.controller, depth if options.grower == "chain" else nodes, depth)
    sampled, beside = options.verifier != "invariant", parts.target.traits.other_threads
    drafter = Grown(make(parts, net, options.width), _grower(options, depth), sampled, beside=beside)
    return Recipe(name, drafter, verifier(options.verifier), budget)


def _grower(options: BlockOptions, depth: int) -> Grower:
    from outrider.grow.block.best_first import BestFirst
    from outrider.grow.chain import Chain
    from outrider.grow.dyspec import Threshold
    from outrider.grow.either import Either

    match options.grower:
        case "chain":
            return Chain()
        case "dyspec":
            return Threshold(depth)
        case "best-first":
            return BestFirst(depth)
    return Either(BestFirst(depth), Threshold(depth))


@dataclass(frozen=True, slots=True)
class DFlashOptions(BlockOptions):
    recorded: bool = option(False, "on CUDA a proposal is one replay; experimental")


def _dflash_source(parts: Parts, net: Any, width: int, recorded: bool = False) -> Source:
    from outrider.draft.block.dflash import DFlashSource
    from outrider.runtime.layers.choice import block_driver

    key = ("blocks", net, recorded)
    if key not in parts.drafts:  # made once for all methods that draft with this network
        with told_if_compiling("the drafter"):
            parts.drafts[key] = block_driver(
                net, embedding(parts.target, parts.loaded), parts.target if recorded else None
            )
    return DFlashSource(parts.drafts[key], width=width)


def _deer_source(parts: Parts, net: Any, width: int) -> Source:
    from outrider.draft.block.deer import DeerSource
    from outrider.runtime.layers.choice import text_block_driver

    if ("blocks", net) not in parts.drafts:
        parts.drafts["blocks", net] = text_block_driver(net, embedding(parts.target, parts.loaded))
    return DeerSource(parts.drafts["blocks", net], width=width)


@dataclass(frozen=True, slots=True)
class DiffuSpecOptions(Options):
    drafter: str = option(
        "", "a block drafter: a folder or a name in `outrider drafters list`; empty: the newest deer, else dflash"
    )
    budget: int = budget_option(16)
    depth: int = option(16, "how long a draft may be, if the block is as long", least=1)
    mass: float = option(0.8, "tau: share of a place's probability that the search looks at", least=0.0, most=1.0)
    most: int = option(15, "M_max: tokens of a place that it looks at", least=1)
    beam: int = option(3, "B: paths that it keeps", least=1)
    share: float = option(0.5, "lambda: weight of the block drafter against the trigrams", least=0.0, most=1.0)
    controller: Literal["adaptive", "payoff", "fixed"] = option(
        "adaptive", "adaptive: as long as drafts were accepted; payoff: as much as has paid; fixed: the whole budget"
    )
    verifier: VerifierName = option("recursive", "acceptance rule")
    scope: Literal["shared", "prompt", "private"] = option("shared", SCOPE_HELP)
    memory_bytes: int = option(8 << 20, "of the trigrams", least=LEAST_BYTES)

    def check(self) -> None:
        from outrider.draft.block.diffuspec import SUCCESSORS
        from outrider.draft.table.ngram_table import check_room

        check_room(self.memory_bytes, SUCCESSORS)


def _diffuspec(parts: Parts, options: DiffuSpecOptions) -> Recipe:
    from outrider.control.draft_length import DraftLength
    from outrider.core.protocols import WholeSource
    from outrider.draft.block.diffuspec import DiffuSpec, DiffuSpecSource, Trigrams
    from outrider.grow.block.lattice import Lattice
    from outrider.models.trained import drafter_of

    kind = _kind(parts, options.drafter)
    net = drafter_of(parts.loaded, kind, options.drafter, parts.drafts)
    longest, ends = min(options.depth, net.deepest, options.budget), parts.loaded.eos_ids
    search = Lattice(ends, longest, options.mass, options.most, options.beam, options.share)
    trigrams = Trigrams(parts.target.vocab_size, options.memory_bytes)
    blocks = cast(WholeSource, SOURCES[kind](parts, net, max(options.most, 16)))
    drafter = DiffuSpec(
        DiffuSpecSource(blocks, trigrams, options.scope), search, beside=parts.target.traits.other_threads
    )  # fmt: skip
    if options.controller != "adaptive":
        return Recipe("diffuspec", drafter, verifier(options.verifier), controller(options.controller, longest))
    costs = cost_curve(parts).seconds
    return Recipe("diffuspec", drafter, verifier(options.verifier), DraftLength(longest, ends=ends, seconds=costs))


def _kind(parts: Parts, named: str) -> str:
    """Of the drafter that is named, else the first kind of which the target has one."""
    from outrider.models.kept import find_drafter

    if loaded := [kind for kind in SOURCES if (kind, named) in parts.drafts]:
        return loaded[0]
    if named:
        return _kind_of_folder(named)
    return next((kind for kind in SOURCES if find_drafter(parts.loaded, kind) is not None), next(iter(SOURCES)))


def _kind_of_folder(named: str) -> str:
    """Of the drafter in this folder or of this name; one that is no block drafter is refused."""
    from outrider.models.drafts import read_card
    from outrider.models.kept import named_folder

    kind = read_card(named_folder(named)).kind
    if kind not in SOURCES:
        raise InputError(f"option drafter is {named!r}, a drafter of kind {kind}; use one of {', '.join(SOURCES)}")
    return kind


def _check_either(options: DiffuSpecOptions) -> None:
    from outrider.models.kept import all_drafters

    if options.drafter:
        _kind_of_folder(options.drafter)
    elif not {drafter.card.kind for drafter in all_drafters()} & {*SOURCES}:
        check_drafter(next(iter(SOURCES)), "")


SOURCES: dict[str, MakeSource] = {"deer": _deer_source, "dflash": _dflash_source}


def _dflash(parts: Parts, options: DFlashOptions) -> Recipe:
    return grown("dflash", "dflash", partial(_dflash_source, recorded=options.recorded), parts, options)


def _deer(parts: Parts, options: BlockOptions) -> Recipe:
    return grown("deer", "deer", _deer_source, parts, options)


RECIPES = (
    MethodInfo(
        "dflash", "a few trained layers fill a block of masks in one pass over the target's states; a best-first tree",
        "arXiv 2602.06036", "block", True, "a trained drafter (outrider train run)", DFlashOptions, _dflash,
        "draft/block/dflash.py", lambda options: check_drafter("dflash", options.drafter), role=Role.RUNS, samples=True,
    ),
    MethodInfo(
        "deer", "some of the target's layers, trained to fill a block of masks behind the text; a best-first tree",
        "arXiv 2512.15176", "block", True, "a trained drafter (outrider train run)", BlockOptions, _deer,
        "draft/block/deer.py", lambda options: check_drafter("deer", options.drafter), role=Role.RUNS, samples=True,
    ),
    MethodInfo(
        "diffuspec", "of a block drafter's likely tokens the path that a trigram model finds to read best",
        "arXiv 2510.02358", "block", True, "a trained block drafter (outrider train run)", DiffuSpecOptions, _diffuspec,
        "draft/block/diffuspec.py", _check_either, role=Role.RUNS,
    ),
)  # fmt: skip
