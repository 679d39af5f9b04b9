"""The method whose drafts are made by trained rows in the target's own pass."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import AUTO, Candidates, budget_option, check_drafter, controller, cost_curve, verifier

ROWS = (3, 4, 6, 8, 12, 16, 24, 32, 48)  # beside the pending token's: what is tried where nobody says


@dataclass(frozen=True, slots=True)
class PromptOptions(Options):
    drafter: str = option(
        "", "a folder made by `outrider train run --kind ppd` or a name in `outrider drafters list`; empty: the newest"
    )
    budget: Candidates = budget_option(
        AUTO, "rows a step beside the pending token's, prompts included; auto: what brings most by measured step costs"
    )


def _build(parts: Parts, options: PromptOptions) -> Recipe:
    from outrider.draft.feature.prompt_rows import PromptDrafter
    from outrider.grow.sparse_states import best_rows, sparse_states
    from outrider.models.trained import drafter_of

    target = parts.target
    if not target.traits.side_rows:
        raise InputError(
            f"the runtime {target.traits.runtime} does not run rows of a drafter's vectors for this model, which ppd "
            "needs; use the runtime native, eager or graphs"
        )
    net = drafter_of(parts.loaded, "ppd", options.drafter, parts.drafts)
    rates, members = net.rates.double().cpu().numpy(), net.shape.members
    if isinstance(options.budget, int):
        rows = min(options.budget, target.max_rows - 1)
        states = sparse_states(rates, rows, members)
    else:
        tried = [rows for rows in ROWS if rows < target.max_rows] or [target.max_rows - 1]
        rows, states = best_rows(rates, members, tried, cost_curve(parts).seconds)
    drafter = PromptDrafter(net.vectors, states.states, ranks=net.shape.ranks)
    return Recipe("ppd", drafter, verifier("invariant"), controller("fixed", rows, net.deepest))


RECIPES = (
    MethodInfo(
        "ppd", "trained rows in the target's own pass guess what comes later; a sparse tree by measured costs",
        "arXiv 2405.18628", "feature", True, "a trained drafter (outrider train run)", PromptOptions, _build,
        "draft/feature/prompt_rows.py", lambda options: check_drafter("ppd", options.drafter), role=Role.FREE,
    ),
)  # fmt: skip
