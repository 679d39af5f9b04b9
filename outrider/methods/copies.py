"""Methods that copy: what was said before, in the request or in finished ones, or what has to follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.core.protocols import Recipe
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    ControllerName,
    VerifierName,
    budget_option,
    controller,
    verifier,
)


@dataclass(frozen=True, slots=True)
class SuffixOptions(Options):
    budget: int = budget_option(32)
    max_depth: int = option(64, "longest match that counts, in tokens", least=2)
    memory_bytes: int = option(64 << 20, "bytes for finished requests; the oldest are forgotten first", least=0)
    scope: Literal["shared", "private"] = option("shared", "shared: learn from finished requests; private: do not")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")

    def check(self) -> None:
        from outrider.draft.lookup.suffix import check_room

        if self.scope == "shared":
            check_room(self.memory_bytes)


@dataclass(frozen=True, slots=True)
class PredictedOptions(Options):
    budget: int = budget_option(16)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")


@dataclass(frozen=True, slots=True)
class JumpForwardOptions(Options):
    budget: int = budget_option(16)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")


def _suffix(parts: Parts, options: SuffixOptions) -> Recipe:
    from outrider.draft.lookup.suffix import Suffix

    drafter = Suffix(options.max_depth, options.memory_bytes, options.scope == "shared")
    # Counted as a chain: a sure match is copied far, an unsure one spends the same candidates side by side.
    budget = controller(options.controller, options.budget)
    return Recipe("suffix", drafter, verifier(options.verifier), budget)


def _predicted(parts: Parts, options: PredictedOptions) -> Recipe:
    from outrider.draft.lookup.predicted import Predicted

    budget = controller(options.controller, options.budget)
    return Recipe("predicted", Predicted(), verifier(options.verifier), budget)


def _jump_forward(parts: Parts, options: JumpForwardOptions) -> Recipe:
    from outrider.draft.lookup.jump_forward import JumpForward

    budget = controller(options.controller, options.budget)
    return Recipe("jump-forward", JumpForward(), verifier(options.verifier), budget)


RECIPES = (
    MethodInfo(
        "suffix", "continues as the longest matches went on, in this request and in finished ones",
        "SAM-Decoding arXiv 2411.10666; SuffixDecoding arXiv 2411.04975", "retrieval", True, "nothing",
        SuffixOptions, _suffix, "draft/lookup/suffix.py",
    ),
    MethodInfo(
        "predicted", "drafts from a text the caller expects, through insertions and deletions",
        "-", "retrieval", True, "a prediction", PredictedOptions, _predicted, "draft/lookup/predicted.py",
    ),
    MethodInfo(
        "jump-forward", "drafts the text that a grammar or schema leaves no choice about",
        "after SGLang arXiv 2312.07104", "retrieval", True, "a constraint",
        JumpForwardOptions, _jump_forward, "draft/lookup/jump_forward.py",
    ),
)  # fmt: skip
