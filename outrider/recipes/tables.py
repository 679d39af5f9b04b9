"""Methods that draft from tables which the target's own work fills: no model, no training, nothing to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InputError
from outrider.methods import MethodInfo, Parts, option
from outrider.protocols import Recipe, Role
from outrider.recipes.common import CONTROLLER_HELP, ControllerName, VerifierName, at_least, controller, verifier

SCOPE_HELP = "shared: all sequences learn together; private: what a request teaches ends with it"


@dataclass(frozen=True, slots=True)
class RecyclingOptions:
    budget: int = option(32, "most candidates a step")
    depth: int = option(8, "how deep a tree may be")
    successors: int = option(8, "successors kept for each token")
    shape: Literal["adaptive", "static"] = option("adaptive", "where successors are likeliest, or the paper's one form")
    learn_prompt: bool = option(True, "also learn from the prompt's rows, which the target must then score")
    scope: Literal["shared", "private"] = option("shared", SCOPE_HELP)
    memory_bytes: int = option(128 << 20, "most memory for the matrix, or for all private ones together")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")


@dataclass(frozen=True, slots=True)
class StandOptions:
    budget: int = option(32, "most candidates a step")
    depth: int = option(8, "how deep a tree may be")
    longest: int = option(4, "tokens of the longest context, at most 4")
    shortest: int = option(1, "tokens of the shortest context; the paper has 2")
    candidates: int = option(10, "successors kept for each context")
    learn_prompt: bool = option(True, "also learn from the prompt's rows, which the target must then score")
    learn_rejected: bool = option(False, "also learn from rejected candidates, whose contexts were never text")
    scope: Literal["shared", "prompt", "private"] = option(
        "shared", "shared: all sequences learn together; prompt: those of one prompt; private: each for itself"
    )
    memory_bytes: int = option(64 << 20, "most memory for the table; the oldest entries leave first")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")


@dataclass(frozen=True, slots=True)
class AdedOptions:
    budget: int = option(32, "most candidates a step")
    iterations: int = option(150, "of the search before each draft")
    length: int = option(4, "pairs of tokens in a searched state; drafts are as many tokens deep")
    reward: Literal["intended", "as_published"] = option(
        "intended", "weights along the state, or what the public code adds up instead"
    )
    corpus: str = option("", "text file whose tri-grams the table starts with; empty: it starts empty")
    learn_prompt: bool = option(True, "raise the prompt's tri-grams once")
    scope: Literal["shared", "private"] = option("shared", SCOPE_HELP)
    memory_bytes: int = option(64 << 20, "most memory for the table; the oldest pairs leave first")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")


def _recycling(parts: Parts, options: RecyclingOptions) -> Recipe:
    from outrider.draft.recycling import Recycling

    at_least("depth", options.depth, 1)
    at_least("successors", options.successors, 1)
    drafter = Recycling(
        parts.target.vocab_size, options.successors, options.shape, options.learn_prompt, options.scope,
        options.memory_bytes,
    )  # fmt: skip
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("token-recycling", drafter, verifier(options.verifier), budget)


def _stand(parts: Parts, options: StandOptions) -> Recipe:
    from outrider.draft.stand import Stand

    at_least("depth", options.depth, 1)
    at_least("candidates", options.candidates, 1)
    if not 1 <= options.shortest <= options.longest <= 4:
        spans = f"{options.shortest} and {options.longest}"
        raise InputError(f"options shortest and longest are {spans}; use 1 <= shortest <= longest <= 4")
    drafter = Stand(
        parts.target.vocab_size, options.verifier != "invariant", options.longest, options.shortest,
        options.candidates, options.learn_prompt, options.learn_rejected, options.scope, options.memory_bytes,
    )  # fmt: skip
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("stand", drafter, verifier(options.verifier), budget)


def _aded(parts: Parts, options: AdedOptions) -> Recipe:
    from outrider.draft.aded import Aded, corpus_table
    from outrider.draft.puct import Settings

    at_least("iterations", options.iterations, 1)
    at_least("length", options.length, 2)
    vocab_size = parts.target.vocab_size
    corpus = corpus_table(_corpus_tokens(parts, options.corpus), vocab_size) if options.corpus else None
    drafter = Aded(
        vocab_size, Settings(options.iterations, options.length, as_published=options.reward == "as_published"),
        learn_prompt=options.learn_prompt, scope=options.scope, memory_bytes=options.memory_bytes, corpus=corpus,
    )  # fmt: skip
    budget = controller(options.controller, options.budget, options.length)
    return Recipe("aded", drafter, verifier(options.verifier), budget)


def _corpus_tokens(parts: Parts, file: str) -> NDArray[np.int64]:
    if parts.loaded.tokenizer is None:
        raise InputError("option corpus needs a tokenizer; load the model with one, or leave the corpus out")
    pieces: list[int] = []
    try:
        with open(file, encoding="utf-8") as lines:
            while batch := lines.readlines(1 << 20):
                pieces += parts.loaded.tokenizer("".join(batch), add_special_tokens=False)["input_ids"]
    except UnicodeDecodeError:
        raise InputError(f"option corpus: {file} is not UTF-8 text; convert it first") from None
    except OSError as error:
        raise InputError(
            f"option corpus: {file} cannot be read ({error.strerror}); give an existing text file"
        ) from None
    if len(pieces) < 3:
        raise InputError(f"option corpus: {file} has {len(pieces)} tokens; give a text of at least 3")
    return np.array(pieces, dtype=np.int64)


RECIPES = (
    MethodInfo(
        "token-recycling", "successors that the target itself ranked highest, walked as a tree",
        "arXiv 2408.08696", "table", True, "nothing", RecyclingOptions, _recycling, "draft/recycling.py",
        Role.LOOKS,
    ),
    MethodInfo(
        "stand", "draws from the mean of the target's own laws after the last few tokens",
        "arXiv 2506.04708", "table", True, "nothing", StandOptions, _stand, "draft/stand.py", Role.LOOKS, samples=True,
    ),
    MethodInfo(
        "aded", "a tri-gram table that follows the text, searched for the prefixes worth a draft",
        "arXiv 2407.12021", "table", True, "nothing (a corpus helps)", AdedOptions, _aded, "draft/aded.py",
    ),
)  # fmt: skip
