"""Methods whose drafter speaks another vocabulary: a model with its own tokenizer, or a lookup over plain bytes.

What it proposes reaches the target through text; a cache learns which runs of the drafter's tokens the target says in
one token of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    LEAST_BYTES,
    ControllerName,
    VerifierName,
    budget_option,
    check_draft,
    controller,
    verifier,
)

if TYPE_CHECKING:
    from outrider.draft.model.cross_vocabulary import CrossVocabulary
    from outrider.models import LoadedModel

log = logging.getLogger("outrider")
MEMORY = 4 << 20


@dataclass(frozen=True, slots=True)
class OmniDraftOptions(Options):
    draft: str = option(
        "", "hub id, folder or .gguf of any vocabulary; empty: no model, a lookup over the text's bytes"
    )
    budget: int = budget_option(8)
    width: int = option(256, "how many of the likeliest tokens a draft row keeps", least=1)
    memory_bytes: int = option(
        MEMORY, "most memory for the runs of draft tokens that the target says in one", least=LEAST_BYTES
    )
    scope: Literal["shared", "private"] = option("shared", "whether what is learnt serves all requests or its own")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule; with the invariant one a draft shares its noise")


def cross_source(
    parts: Parts, draft: LoadedModel, width: int, memory_bytes: int = MEMORY, private: bool = False
) -> CrossVocabulary:  # fmt: skip
    """A draft model with its own tokenizer; both tokenizers are there."""
    from outrider.draft.model.cross_vocabulary import CrossVocabulary
    from outrider.draft.model.vocabulary_map import VocabularyMap
    from outrider.models.vocabulary import TokenizerBytes

    runtime = parts.runtime(draft.model)
    target = TokenizerBytes(parts.loaded.tokenizer)
    vocabulary = TokenizerBytes(draft.tokenizer, runtime.vocab_size)
    key = ("vocabulary map", draft.name)
    if key not in parts.drafts:
        parts.drafts[key] = VocabularyMap(target.pieces[: parts.target.vocab_size], vocabulary.pieces, target.encode)
        log.warning("%s has another vocabulary than %s: it drafts through text", draft.name, parts.loaded.name)
    names = {i: name for name, i in target.names.items()}
    return CrossVocabulary(runtime, parts.drafts[key], names, vocabulary, width, memory_bytes, private=private)


def _omnidraft(parts: Parts, options: OmniDraftOptions) -> Recipe:
    build = _with_a_model if options.draft else _with_bytes
    return build(parts, options)


def _with_bytes(parts: Parts, options: OmniDraftOptions) -> Recipe:
    from outrider.draft.lookup.byte_lookup import ByteLookup

    drafter = ByteLookup(_pieces(parts), options.memory_bytes, options.scope == "private")
    budget = controller(options.controller, options.budget)
    return Recipe("omnidraft-ngram", drafter, verifier(options.verifier), budget)


def _pieces(parts: Parts) -> Sequence[bytes]:
    from outrider.draft.model.vocabulary_map import characters
    from outrider.models.vocabulary import token_bytes

    size = parts.target.vocab_size
    return characters(size) if parts.loaded.tokenizer is None else token_bytes(parts.loaded.tokenizer)[:size]


def _with_a_model(parts: Parts, options: OmniDraftOptions) -> Recipe:
    from outrider.draft.model.cross_vocabulary import CrossVocabularyDrafter
    from outrider.grow.chain import Chain
    from outrider.grow.shared import SharedRace

    key = (options.draft, "any vocabulary")
    if key not in parts.drafts:
        parts.drafts[key] = parts.load(options.draft)
    draft = parts.drafts[key]
    if parts.loaded.tokenizer is None or draft.tokenizer is None:
        lacking = parts.loaded if parts.loaded.tokenizer is None else draft
        raise InputError(f"{lacking.name!r} has no tokenizer to draft through text; use the method draft-model")
    shared = options.verifier == "invariant"
    source = cross_source(parts, draft, options.width, options.memory_bytes, options.scope == "private")
    source.name = "omnidraft-ngram"
    grower = SharedRace((1,) * options.budget) if shared else Chain()
    budget = controller(options.controller, options.budget)
    return Recipe(
        "omnidraft-ngram", CrossVocabularyDrafter(source, grower, True, shared), verifier(options.verifier), budget
    )


RECIPES = (
    MethodInfo(
        "omnidraft-ngram", "a drafter of another vocabulary, read through text with a cache that learns merges",
        "arXiv 2507.02659", "retrieval", True, "nothing (or any draft model)",
        OmniDraftOptions, _omnidraft, "draft/model/cross_vocabulary.py", lambda options: check_draft(options.draft),
        role=Role.RUNS, samples=True,
    ),
)  # fmt: skip
