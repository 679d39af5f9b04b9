"""Methods that draft from tables which the target's own work fills: no model, no training, nothing to load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TextIO

import numpy as np
from numpy.typing import NDArray

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
    controller,
    verifier,
)

SCOPE_HELP = "shared: all sequences learn together; private: what a request teaches ends with it"


@dataclass(frozen=True, slots=True)
class RecyclingOptions(Options):
    budget: int = budget_option(32)
    depth: int = option(8, "how deep a tree may be", least=1)
    successors: int = option(8, "successors kept for each token", least=1)
    shape: Literal["adaptive", "static"] = option("adaptive", "where successors are likeliest, or the paper's one form")
    learn_prompt: bool = option(True, "also learn from the prompt's rows, which the target must then score")
    scope: Literal["shared", "private"] = option("shared", SCOPE_HELP)
    memory_bytes: int = option(
        128 << 20, "most memory for the matrix, or for all private ones together", least=LEAST_BYTES
    )
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")


@dataclass(frozen=True, slots=True)
class StandOptions(Options):
    budget: int = budget_option(32)
    depth: int = option(8, "how deep a tree may be", least=1)
    longest: int = option(4, "tokens of the longest context, at most 4", least=1, most=4)
    shortest: int = option(1, "tokens of the shortest context; the paper has 2", least=1, most=4)
    candidates: int = option(10, "successors kept for each context", least=1)
    learn_prompt: bool = option(True, "also learn from the prompt's rows, which the target must then score")
    learn_rejected: bool = option(False, "also learn from rejected candidates, whose contexts were never text")
    scope: Literal["shared", "prompt", "private"] = option(
        "shared", "shared: all sequences learn together; prompt: those of one prompt; private: each for itself"
    )
    memory_bytes: int = option(64 << 20, "most memory for the table; the oldest entries leave first", least=0)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")

    def check(self) -> None:
        from outrider.draft.table.ngram_table import check_room

        if self.shortest > self.longest:
            spans = f"{self.shortest} and {self.longest}"
            raise InputError(f"options shortest and longest are {spans}; use 1 <= shortest <= longest <= 4")
        check_room(self.memory_bytes, self.candidates)


@dataclass(frozen=True, slots=True)
class AdedOptions(Options):
    budget: int = budget_option(32)
    iterations: int = option(150, "of the search before each draft", least=1)
    length: int = option(4, "pairs of tokens in a searched state; drafts are as many tokens deep", least=2)
    reward: Literal["intended", "as_published"] = option(
        "intended", "weights along the state, or what the public code adds up instead"
    )
    corpus: str = option("", "text file whose tri-grams the table starts with; empty: it starts empty")
    learn_prompt: bool = option(True, "raise the prompt's tri-grams once")
    scope: Literal["shared", "private"] = option("shared", SCOPE_HELP)
    memory_bytes: int = option(64 << 20, "most memory for the table; the oldest pairs leave first", least=0)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")

    def check(self) -> None:
        from outrider.draft.table.aded import SUCCESSORS
        from outrider.draft.table.ngram_table import check_room

        check_room(self.memory_bytes, SUCCESSORS)


def _recycling(parts: Parts, options: RecyclingOptions) -> Recipe:
    from outrider.draft.table.recycling import Recycling

    drafter = Recycling(
        parts.target.vocab_size, options.successors, options.shape, options.learn_prompt, options.scope,
        options.memory_bytes,
    )  # fmt: skip
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("token-recycling", drafter, verifier(options.verifier), budget)


def _stand(parts: Parts, options: StandOptions) -> Recipe:
    from outrider.draft.table.stand import Stand

    drafter = Stand(
        parts.target.vocab_size, options.verifier != "invariant", options.longest, options.shortest,
        options.candidates, options.learn_prompt, options.learn_rejected, options.scope, options.memory_bytes,
    )  # fmt: skip
    budget = controller(options.controller, options.budget, options.depth)
    return Recipe("stand", drafter, verifier(options.verifier), budget)


def _aded(parts: Parts, options: AdedOptions) -> Recipe:
    from outrider.draft.table.aded import Aded, corpus_table
    from outrider.draft.table.puct import Settings

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
    with _opened(file) as lines:
        while batch := lines.readlines(1 << 20):
            pieces += parts.loaded.tokenizer("".join(batch), add_special_tokens=False)["input_ids"]
    if len(pieces) < 3:
        raise InputError(f"option corpus: {file} has {len(pieces)} tokens; give a text of at least 3")
    return np.array(pieces, dtype=np.int64)


def _check_corpus(options: AdedOptions) -> None:
    if options.corpus:
        with _opened(options.corpus) as lines:
            lines.readline()


@contextmanager
def _opened(file: str) -> Iterator[TextIO]:
    try:
        with open(file, encoding="utf-8") as lines:
            yield lines
    except UnicodeDecodeError:
        raise InputError(f"option corpus: {file} is not UTF-8 text; convert it first") from None
    except OSError as error:
        raise InputError(
            f"option corpus: {file} cannot be read ({error.strerror}); give an existing text file"
        ) from None


RECIPES = (
    MethodInfo(
        "token-recycling", "successors that the target itself ranked highest, walked as a tree",
        "arXiv 2408.08696", "table", True, "nothing", RecyclingOptions, _recycling, "draft/table/recycling.py",
        role=Role.LOOKS,
    ),
    MethodInfo(
        "stand", "draws from the mean of the target's distributions after the last few tokens",
        "arXiv 2506.04708", "table", True, "nothing", StandOptions, _stand, "draft/table/stand.py",
        role=Role.LOOKS, samples=True,
    ),
    MethodInfo(
        "aded", "a tri-gram table that follows the text, searched for the prefixes worth a draft",
        "arXiv 2407.12021", "table", True, "nothing (a corpus helps)", AdedOptions, _aded, "draft/table/aded.py",
        _check_corpus,
    ),
)  # fmt: skip
