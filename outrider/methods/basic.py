"""Methods that need nothing but the target: plain decoding, prompt lookup, and the yardstick."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import CONTROLLER_HELP, ControllerName, VerifierName, budget_option, controller, verifier


@dataclass(frozen=True, slots=True)
class PromptLookupOptions(Options):
    budget: int = budget_option(16)
    max_ngram: int = option(3, "longest suffix that is looked up", least=1)
    min_ngram: int = option(1, "shortest suffix that is looked up", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")

    def check(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise InputError(f"option min_ngram is {self.min_ngram}; use 1..max_ngram ({self.max_ngram})")


@dataclass(frozen=True, slots=True)
class AcceptNoneOptions(Options):
    budget: int = budget_option(16)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)


def _plain(parts: Parts, options: Options) -> Recipe:
    return Recipe("plain", None, verifier("invariant"), controller("fixed", 0))


def _prompt_lookup(parts: Parts, options: PromptLookupOptions) -> Recipe:
    from outrider.draft.lookup.prompt_lookup import PromptLookup

    drafter = PromptLookup(options.max_ngram, options.min_ngram)
    budget = controller(options.controller, options.budget)
    return Recipe("prompt-lookup", drafter, verifier(options.verifier), budget)


def _accept_none(parts: Parts, options: AcceptNoneOptions) -> Recipe:
    from outrider.draft.unlikely import Unlikely

    return Recipe("accept-none", Unlikely(), verifier("invariant"), controller(options.controller, options.budget))


RECIPES = (
    MethodInfo(
        "plain", "no speculation: the target alone, through the same loop", "-", "baseline", True, "nothing",
        Options, _plain, "core/engine.py",
    ),
    MethodInfo(
        "prompt-lookup", "copies what followed an earlier occurrence of the last tokens",
        "Saxena 2023; LLMA arXiv 2304.04487", "retrieval", True, "nothing",
        PromptLookupOptions, _prompt_lookup, "draft/lookup/prompt_lookup.py",
    ),
    MethodInfo(
        "accept-none", "proposes what is never accepted: what speculation costs at worst", "-", "yardstick", True,
        "nothing", AcceptNoneOptions, _accept_none, "draft/unlikely.py",
    ),
)  # fmt: skip
