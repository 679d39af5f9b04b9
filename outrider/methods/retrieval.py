"""Methods that copy from a corpus: the retrieval store alone, and together with a draft model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from outrider.core.errors import InputError
from outrider.core.protocols import Drafter, Recipe
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    ControllerName,
    VerifierName,
    budget_option,
    check_draft,
    check_store,
    controller,
    verifier,
)
from outrider.methods.drafted import A_DRAFT, TreeOptions, draft_source

if TYPE_CHECKING:
    from outrider.store.store import Store

log = logging.getLogger("outrider")
BUILD = "outrider index build --corpus FOLDER --tokenizer MODEL --out STORE"


@dataclass(frozen=True, slots=True)
class RetrievalOptions(Options):
    store: str = option("", f"folder of a store, made with: {BUILD}")
    budget: int = budget_option(32)
    depth: int = option(16, "how deep a tree may be", least=1)
    rows: int = option(128, "most occurrences that are looked at", least=1)
    enough: int = option(8, "with fewer occurrences, shorter matches are looked up too", least=1)
    shortest: int = option(2, "shortest match that is used", least=1)
    floor: float = option(0.02, "candidates that are less likely are left out", least=0, most=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")


@dataclass(frozen=True, slots=True)
class RasdOptions(TreeOptions):
    store: str = option("", "folder of a store; empty: what is retrieved comes from the text itself")
    keep: int = option(10, "how many of the draft's likeliest first tokens a retrieved branch may begin with", least=0)
    share: float = option(0.5, "most of the budget that retrieved candidates get", least=0, most=1)
    beam: int = option(4, "most nodes of the draft at each depth", least=1)


def _retrieval(parts: Parts, options: RetrievalOptions) -> Recipe:
    from outrider.draft.lookup.retrieval import Retrieval

    if not options.store:
        _say_once()
    store = store_of(parts, options.store)
    drafter = Retrieval(store, options.depth, options.rows, options.enough, options.shortest, floor=options.floor)
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("retrieval", drafter, verifier(options.verifier), budget)


def _rasd(parts: Parts, options: RasdOptions) -> Recipe:
    from outrider.draft.grown import Grown
    from outrider.draft.lookup.prompt_lookup import PromptLookup
    from outrider.draft.lookup.rasd import FirstDistributions, Rasd
    from outrider.draft.lookup.retrieval import Retrieval
    from outrider.grow.rsd import StochasticBeam
    from outrider.grow.topk import TopK

    sampled = options.verifier != "invariant"
    grower = StochasticBeam(options.beam, options.depth) if sampled else TopK(options.beam, depth=options.depth)
    first = FirstDistributions(draft_source(parts, options.draft, options.layers, options.width))
    retriever: Drafter = Retrieval(store_of(parts, options.store)) if options.store else PromptLookup()
    drafter = Rasd(Grown(first, grower, sampled), first, retriever, options.keep, options.share)
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("rasd", drafter, verifier(options.verifier), budget)


def store_of(parts: Parts, folder: str) -> Store:
    """The store, refused where its ids are not the target's; an empty one where none is named."""
    from outrider.store.store import Store, open_store
    from outrider.store.tokens import fingerprint

    if not folder:
        return Store()
    store = open_store(folder, fingerprint(parts.loaded.tokenizer), repr(parts.loaded.name))
    if store.vocabulary > parts.target.vocab_size:
        raise InputError(
            f"{folder}: has ids up to {store.vocabulary:,} and {parts.loaded.name!r} has {parts.target.vocab_size:,}; "
            f"build one for it with: {BUILD}"
        )
    return store


def _places(options: RasdOptions) -> None:
    check_draft(options.draft)
    check_store(options.store)


@cache
def _say_once() -> None:
    log.warning("the method retrieval has no store and will propose nothing; build one: %s; then -o store=STORE", BUILD)


RECIPES = (
    MethodInfo(
        "retrieval", "copies what followed the longest match in a corpus on disk",
        "REST arXiv 2311.08252; infini-gram arXiv 2401.17377", "retrieval", True, "a corpus (outrider index build)",
        RetrievalOptions, _retrieval, "draft/lookup/retrieval.py", lambda options: check_store(options.store),
    ),
    MethodInfo(
        "rasd", "a draft model's tree joined with what was retrieved, pruned by the draft's first distribution",
        "arXiv 2503.03434", "model", True, f"{A_DRAFT}; a corpus if there is one",
        RasdOptions, _rasd, "draft/lookup/rasd.py", _places, role=Role.RUNS, samples=True,
    ),
)  # fmt: skip
