"""The method that drafts several paths with the forwards of one, from a mixture of their last tokens."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    ControllerName,
    budget_option,
    check_draft,
    check_store,
    controller,
    verifier,
)
from outrider.methods.drafted import A_DRAFT, draft_model
from outrider.methods.retrieval import store_of


@dataclass(frozen=True, slots=True)
class SuperposedOptions(Options):
    draft: str = option("", "hub id, folder or .gguf; empty: the draft shipped for this target, or its first layers")
    layers: int = option(
        0, "draft with so many of the target's first layers; 0: the shipped draft, or a quarter", least=0
    )
    budget: int = budget_option(10)
    depth: int = option(4, "how long the paths may be; a forward of the draft model each token", least=1)
    drafts: int = option(3, "paths that grow together", least=1)
    tokens: int = option(3, "likeliest tokens that may go on with a path; the paper keeps 9", least=1)
    alpha: float = option(0.54, "how much n-grams say of whose continuation a token is", least=0, most=1)
    store: str = option("", "a corpus to count n-grams in (outrider index build); empty: the text so far")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)


def _build(parts: Parts, options: SuperposedOptions) -> Recipe:
    from outrider.core.rows.superposed import Superposition
    from outrider.draft.model.superposed import Superposed
    from outrider.models import LoadedModel

    draft = draft_model(parts, options.draft, options.layers)
    if isinstance(draft, LoadedModel):
        raise InputError(f"superposed needs a draft model with the vocabulary of {parts.loaded.name}; name another one")
    target = parts.runtime(draft)
    if not target.traits.side_rows:
        raise InputError(
            f"the runtime {target.traits.runtime} does not run rows of mixed embeddings for the draft model, which "
            "superposed needs; use the runtime native, eager or graphs"
        )
    how = Superposition(options.drafts, options.tokens, options.alpha)
    corpus = store_of(parts, options.store) if options.store else None
    drafter = Superposed(target, embed=draft.get_input_embeddings(), how=how, corpus=corpus)
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("superposed", drafter, verifier("invariant"), budget)


def _places(options: SuperposedOptions) -> None:
    check_draft(options.draft)
    check_store(options.store)


RECIPES = (
    MethodInfo(
        "superposed", "several paths for the forwards of one: a draft model reads a mixture of their last tokens",
        "arXiv 2405.18400", "model", True, A_DRAFT, SuperposedOptions, _build, "draft/model/superposed.py", _places,
        role=Role.RUNS,
    ),
)  # fmt: skip
