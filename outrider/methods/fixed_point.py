"""Methods that draft with the target itself: guesses that its own predictions improve from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.core.protocols import Recipe
from outrider.core.records import Role
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
class JacobiOptions(Options):
    budget: int = budget_option(16, "the window: most candidates a step")
    init: Literal["copy", "repeat", "random"] = option(
        "copy", "how a guess begins: copied from the text, the last token again, or a random recent token"
    )
    width: int = option(64, "how many of the likeliest tokens a sampled guess is drawn from", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("rejection", "acceptance rule; the invariant one drafts without sampling")


@dataclass(frozen=True, slots=True)
class LookaheadOptions(Options):
    window: int = option(4, "columns that the target continues in every step", least=1)
    ngram: int = option(4, "tokens of an n-gram; a column has one less", least=2)
    guesses: int = option(4, "most n-grams proposed a step, and kept for one first token", least=1)
    budget: int = budget_option(24, "most candidates a step: proposed n-grams first, then as many columns as fit")
    text: bool = option(True, "the n-grams of prompt and output enter the pool too")
    scope: Literal["shared", "private"] = option("private", "one pool for all requests, or one for each")
    memory_bytes: int = option(4 << 20, "size of a pool", least=0)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("invariant", "acceptance rule")

    def check(self) -> None:
        from outrider.draft.table.ngram_pool import check_room

        check_room(self.memory_bytes, self.ngram, self.guesses)


def _jacobi(parts: Parts, options: JacobiOptions) -> Recipe:
    from outrider.draft.table.jacobi import Jacobi

    drafter = Jacobi(options.budget, options.init, options.verifier != "invariant", options.width)
    return Recipe("jacobi", drafter, verifier(options.verifier), controller(options.controller, options.budget))


def _lookahead(parts: Parts, options: LookaheadOptions) -> Recipe:
    from outrider.draft.table.lookahead import Lookahead

    drafter = Lookahead(
        options.window, options.ngram, options.guesses, options.text, options.scope == "shared", options.memory_bytes
    )
    depth = min(options.budget, options.window + options.ngram - 2)
    budget = controller(options.controller, options.budget, depth)
    return Recipe("lookahead", drafter, verifier(options.verifier), budget)


RECIPES = (
    MethodInfo(
        "lookahead", "runs ahead on a window of guesses and proposes the n-grams that came out of it",
        "arXiv 2402.02057", "fixed point", True, "nothing",
        LookaheadOptions, _lookahead, "draft/table/lookahead.py", role=Role.LOOKS,
    ),
    MethodInfo(
        "jacobi", "the target's own predictions for a window, verified and improved in each step",
        "arXiv 2305.10427; arXiv 2410.01699", "fixed point", True, "nothing",
        JacobiOptions, _jacobi, "draft/table/jacobi.py", role=Role.LOOKS, samples=True,
    ),
)  # fmt: skip
