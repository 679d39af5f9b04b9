"""Methods that draft with a smaller model: a chain, or a tree of one of the shapes in `grow/`, under the matching rule.

Without a draft model named, the one that comes with the package for this target is used, or else the target's own first
layers. Greedy requests draw nothing: the likeliest tokens stand in the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.core.errors import InputError
from outrider.core.protocols import Grower, Recipe, Source
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    ControllerName,
    VerifierName,
    budget_option,
    check_draft,
    controller,
    cost_curve,
    expansion,
    verifier,
)  # fmt: skip

A_DRAFT = "a draft model (default: shipped, or the target's first layers)"


@dataclass(frozen=True, slots=True)
class ChainOptions(Options):
    draft: str = option("", "hub id, folder or .gguf; empty: the draft shipped for this target, or its first layers")
    layers: int = option(
        0, "draft with so many of the target's first layers; 0: the shipped draft, or a quarter", least=0
    )
    budget: int = budget_option(5)
    width: int = option(256, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("rejection", "acceptance rule; with the invariant one the draft shares its noise")


@dataclass(frozen=True, slots=True)
class BlockOptions(ChainOptions):
    verifier: VerifierName = option("block", "acceptance rule")


@dataclass(frozen=True, slots=True)
class TreeOptions(ChainOptions):
    budget: int = budget_option(16)
    depth: int = option(5, "how deep a tree may be", least=1)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")


@dataclass(frozen=True, slots=True)
class KAryOptions(TreeOptions):
    expansion: str = option("3,2,1,1", "children at each depth")

    def check(self) -> None:
        expansion("expansion", self.expansion)


@dataclass(frozen=True, slots=True)
class SpecTrOptions(KAryOptions):
    expansion: str = option("4,1,1,1", "children at each depth; the paper's parallel drafts branch at the root only")
    verifier: VerifierName = option("k-seq", "acceptance rule")


@dataclass(frozen=True, slots=True)
class OptimalOptions(KAryOptions):
    verifier: VerifierName = option("optimal", "acceptance rule")


@dataclass(frozen=True, slots=True)
class TraversalOptions(KAryOptions):
    verifier: VerifierName = option("traversal", "acceptance rule")


@dataclass(frozen=True, slots=True)
class BeamOptions(TreeOptions):
    beam: int = option(4, "most nodes at each depth", least=1)


@dataclass(frozen=True, slots=True)
class DySpecOptions(TreeOptions):
    form: Literal["threshold", "heap"] = option("threshold", "one draft call a level, or one an expanded node")


@dataclass(frozen=True, slots=True)
class STreeOptions(TreeOptions):
    budget: int = budget_option(12)
    depth: int = option(4, "how deep a tree may be", least=1)
    beam: int = option(3, "nodes expanded at each depth, and children of each", least=1)
    verifier: VerifierName = option("invariant", "acceptance rule")


@dataclass(frozen=True, slots=True)
class CostAwareOptions(TreeOptions):
    budget: int = budget_option(32)
    depth: int = option(8, "how deep a tree may be", least=1)
    controller: ControllerName = option("fixed", "the shape itself follows cost and acceptance")


def _chain(name: str) -> Callable[[Parts, ChainOptions], Recipe]:
    def build(parts: Parts, options: ChainOptions) -> Recipe:
        from outrider.grow.chain import Chain
        from outrider.grow.shared import SharedRace

        if options.verifier == "invariant":
            race = SharedRace((1,) * options.budget)
            return _drafted(name, parts, options, race, options.budget, shared=True)
        return _drafted(name, parts, options, Chain(), options.budget)

    return build


def _tree(name: str, grower: Callable[[Parts, Any], Grower]) -> Callable[[Parts, Any], Recipe]:
    def build(parts: Parts, options: TreeOptions) -> Recipe:
        return _drafted(name, parts, options, grower(parts, options), options.depth)

    return build


def _drafted(name: str, parts: Parts, options: Any, grower: Grower, depth: int, shared: bool = False) -> Recipe:
    from outrider.draft.grown import Grown
    from outrider.draft.model.cross_vocabulary import CrossVocabulary, CrossVocabularyDrafter

    source = draft_source(parts, options.draft, options.layers, options.width)
    kind = CrossVocabularyDrafter if isinstance(source, CrossVocabulary) else Grown
    sampled = shared or options.verifier != "invariant"
    budget = controller(options.controller, options.budget, depth)
    return Recipe(name, kind(source, grower, sampled, shared), verifier(options.verifier), budget)


def draft_source(parts: Parts, named: str, layers: int, width: int) -> Source:
    """The draft model's distributions over the target's tokens, whatever its vocabulary."""
    from outrider.draft.model.draft_model import ModelSource
    from outrider.methods.cross import cross_source
    from outrider.models import LoadedModel

    draft = draft_model(parts, named, layers)
    if isinstance(draft, LoadedModel):
        return cross_source(parts, draft, width)
    return ModelSource(parts.runtime(draft), width)


def same_vocabulary_draft(parts: Parts, named: str) -> Any:
    """A draft model that says the target's own tokens; another is refused."""
    from outrider.models import LoadedModel

    draft = draft_model(parts, named, 0)
    if isinstance(draft, LoadedModel):
        raise InputError(f"draft {named} has another vocabulary than the target; this method needs the same one")
    return draft


def draft_model(parts: Parts, named: str, layers: int) -> Any:
    """The draft model, made once for all methods of one target; with its tokenizer where that is another one."""
    key = (named, layers)
    if key not in parts.drafts:
        parts.drafts[key] = _make_draft(parts, named, layers)
    return parts.drafts[key]


def _make_draft(parts: Parts, named: str, layers: int) -> Any:
    from outrider.models import first_layers, same_vocabulary
    from outrider.models.drafts import CARD, load_draft
    from outrider.models.kept import find_drafter

    if named and (Path(named) / CARD).is_file():
        return load_draft(named, parts.loaded)
    if named:
        loaded = parts.load(named)
        return loaded.model if same_vocabulary(parts.loaded, loaded) else loaded
    if not layers and (shipped := find_drafter(parts.loaded)) is not None:
        return load_draft(shipped, parts.loaded)
    total = int(parts.loaded.model.config.get_text_config().num_hidden_layers)
    count = layers or max(total // 4, 1)
    if not 1 <= count < total:
        raise InputError(f"option layers is {layers}; the target has {total}, use 1..{total - 1}")
    return first_layers(parts.loaded.model, count)


def _k_ary(drawing: str) -> Callable[[Parts, KAryOptions], Grower]:
    def build(parts: Parts, options: KAryOptions) -> Grower:
        from outrider.grow.kary import KAry

        return KAry(expansion("expansion", options.expansion), drawing)

    return build


def _constant_branching(parts: Parts, options: KAryOptions) -> Grower:
    from outrider.grow.rsd import ConstantBranching

    return ConstantBranching(expansion("expansion", options.expansion))


def _stochastic_beam(parts: Parts, options: BeamOptions) -> Grower:
    from outrider.grow.rsd import StochasticBeam

    return StochasticBeam(options.beam, options.depth)


def _dyspec(parts: Parts, options: DySpecOptions) -> Grower:
    from outrider.grow.dyspec import Heap, Threshold

    return Heap(options.depth) if options.form == "heap" else Threshold(options.depth)


def _sequoia(parts: Parts, options: TreeOptions) -> Grower:
    from outrider.grow.sequoia import Sequoia

    return Sequoia(depth=options.depth)


def _top_plus_one(parts: Parts, options: KAryOptions) -> Grower:
    from outrider.grow.top_plus_one import TopPlusOne

    return TopPlusOne(expansion("expansion", options.expansion))


def _beams(parts: Parts, options: STreeOptions) -> Grower:
    from outrider.grow.topk import TopK

    return TopK(options.beam, options.beam, options.depth)


def _cost_aware(parts: Parts, options: CostAwareOptions) -> Grower:
    from outrider.grow.cost_aware import CostAware

    return CostAware(cost_curve(parts).seconds, length=parts.target.length, depth=options.depth)


def _info(
    name: str, summary: str, paper: str, options: type, build: Callable[[Parts, Any], Recipe], file: str
) -> MethodInfo:
    return MethodInfo(
        name, summary, paper, "model", True, A_DRAFT, options, build, file, lambda made: check_draft(made.draft),
        role=Role.RUNS, samples=True,
    )  # fmt: skip


RECIPES = (
    _info(
        "draft-model", "a smaller model drafts a chain, through text where its vocabulary is another",
        "arXiv 2211.17192; arXiv 2302.01318", ChainOptions, _chain("draft-model"), "draft/model/draft_model.py",
    ),
    _info(
        "block-verify", "a drafted chain, accepted as a block: the most that one path allows",
        "arXiv 2403.10444", BlockOptions, _chain("block-verify"), "verify/block.py",
    ),
    _info(
        "specinfer", "a k-ary tree of independent draws, rejected one after the other",
        "arXiv 2305.09781", KAryOptions, _tree("specinfer", _k_ary("iid")), "verify/recursive.py",
    ),
    _info(
        "spectr", "a k-ary tree of independent draws under k-SEQ",
        "arXiv 2310.15141", SpecTrOptions, _tree("spectr", _k_ary("iid")), "verify/kseq.py",
    ),
    _info(
        "rsd-c", "recursive rejection without replacement, constant branching",
        "arXiv 2402.14160", KAryOptions, _tree("rsd-c", _constant_branching), "grow/rsd.py",
    ),
    _info(
        "rsd-s", "recursive rejection without replacement, stochastic beam search",
        "arXiv 2402.14160", BeamOptions, _tree("rsd-s", _stochastic_beam), "grow/rsd.py",
    ),
    _info(
        "sequoia", "the static tree of most expected tokens, by dynamic programming",
        "arXiv 2402.12374", TreeOptions, _tree("sequoia", _sequoia), "grow/sequoia.py",
    ),
    _info(
        "dyspec", "a tree grown where the draft is surest", "arXiv 2410.11744",
        DySpecOptions, _tree("dyspec", _dyspec), "grow/dyspec.py",
    ),
    _info(
        "mdsd-optimal", "the likeliest tokens plus one sampled, with the rule that is optimal for them",
        "arXiv 2502.18779", OptimalOptions, _tree("mdsd-optimal", _top_plus_one), "verify/optimal.py",
    ),
    _info(
        "traversal", "a tree without replacement, verified from the leaves to the root",
        "arXiv 2505.12398", TraversalOptions, _tree("traversal", _k_ary("without-replacement")), "verify/traversal.py",
    ),
    _info(
        "stree", "beams of a small recurrent draft as a tree, for targets with recurrent layers",
        "arXiv 2505.14969", STreeOptions, _tree("stree", _beams), "runtime/recurrent/linear.py",
    ),
    _info(
        "cost-aware-tree", "the shape of most tokens per second, from learnt acceptance and measured step costs", "-",
        CostAwareOptions, _tree("cost-aware-tree", _cost_aware), "grow/cost_aware.py",
    ),
)  # fmt: skip
