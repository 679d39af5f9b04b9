"""Methods whose chains end where another token would probably be in vain, as a trained network says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from outrider.core.errors import InputError
from outrider.core.protocols import Recipe, Source, States
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    ControllerName,
    VerifierName,
    budget_option,
    check_drafter,
    controller,
    verifier,
)
from outrider.methods.drafted import same_vocabulary_draft
from outrider.methods.trained import layered_source

if TYPE_CHECKING:
    from outrider.grow.stopping import Stop
    from outrider.models.networks.acceptance import AcceptanceShape

ACCEPTANCE = "acceptance-head"
JUDGED = "the drafter that the head judges: a folder or a name; empty: the one the target has of that kind"


@dataclass(frozen=True, slots=True)
class SpecDecOptions(Options):
    head: str = option("", "the acceptance head: a folder or a name in `outrider drafters list`; empty: the newest")
    drafter: str = option("", JUDGED)
    threshold: float = option(0.3, "a chain ends once a token in it is rejected with this chance", least=0, most=1)
    least: int = option(2, "shortest chain", least=1)
    budget: int = budget_option(20, "longest chain")
    width: int = option(256, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("rejection", "acceptance rule; with the invariant one the draft shares its noise")


def _specdec(parts: Parts, options: SpecDecOptions) -> Recipe:
    from outrider.draft.acceptance_head import HeadMarks
    from outrider.grow.stopping import Doubt
    from outrider.models.trained import drafter_of

    head = drafter_of(parts.loaded, ACCEPTANCE, options.head, parts.drafts)
    _check_judged(parts, head.shape, options)
    source = chain_source(parts, head.shape.drafter, options.drafter, options.width)
    marks = HeadMarks(cast(States, source), head)
    return _stopping("specdec-plus-plus", parts, options, source, Doubt(options.threshold, options.least), marks)


def _stopping(name: str, parts: Parts, options: Any, source: Source, stop: Stop, marks: Any = None) -> Recipe:
    """Chains of this source, as long as the stop lets them be."""
    from outrider.draft.grown import Grown
    from outrider.grow.stopping import Stopping

    shared = options.verifier == "invariant"
    grower = Stopping(stop, marks, frozenset(parts.loaded.eos_ids), shared)
    drafter = Grown(source, grower, True, shared, beside=parts.target.traits.other_threads)
    return Recipe(name, drafter, verifier(options.verifier), controller(options.controller, options.budget))


def chain_source(parts: Parts, kind: str, named: str, width: int) -> Source:
    """A drafter whose hidden states can be read."""
    from outrider.draft.model.draft_model import ModelSource

    if kind == "draft-model":
        return ModelSource(parts.runtime(same_vocabulary_draft(parts, named)), width, shows=True)
    return layered_source(parts, kind, named, width)


def _check_judged(parts: Parts, shape: AcceptanceShape, options: SpecDecOptions) -> None:
    """Refuse a head that was trained on the states of another drafter."""
    from outrider.models.drafts import digest_of
    from outrider.models.kept import find_drafter

    folder = find_drafter(parts.loaded, shape.drafter, options.drafter)
    if folder is not None and shape.digest and digest_of(folder) != shape.digest:
        raise InputError(
            f"the acceptance head was trained for another {shape.drafter} drafter than {folder}; name that one with "
            f"the option drafter, or train a head with: outrider train run --kind {ACCEPTANCE} --drafter {folder}"
        )


RECIPES = (
    MethodInfo(
        "specdec-plus-plus", "a chain that ends once a trained head thinks it was probably rejected",
        "arXiv 2405.19715", "model", True, "a trained acceptance head (outrider train run)", SpecDecOptions, _specdec,
        "grow/stopping.py", lambda options: check_drafter(ACCEPTANCE, options.head), role=Role.RUNS, samples=True,
    ),
)  # fmt: skip
