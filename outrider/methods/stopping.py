"""Methods whose chains end where another token would probably be in vain, as a trained network says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from outrider.core.errors import InputError
from outrider.core.protocols import Marks, Recipe, Remembers, Source, States
from outrider.core.records import Role
from outrider.methods import MethodInfo, Options, Parts, option
from outrider.methods.common import (
    CONTROLLER_HELP,
    ControllerName,
    VerifierName,
    budget_option,
    check_draft,
    check_drafter,
    controller,
    cost_curve,
    verifier,
)
from outrider.methods.drafted import same_vocabulary_draft
from outrider.methods.trained import layered_source

if TYPE_CHECKING:
    from outrider.grow.cost_aware import CallTimer
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
    return _stopping("specdec-plus-plus", parts, options, source, Doubt(options.threshold, options.least), marks=marks)


@dataclass(frozen=True, slots=True)
class SpecKVOptions(Options):
    draft: str = option("", "a draft-model folder of the target's own vocabulary; empty: the one the target has")
    mode: Literal["time", "paper"] = option(
        "time", "time: most expected tokens a second; paper: most expected tokens, which is not a speed"
    )
    budget: int = budget_option(8, "longest chain; of it 2, 4, 6 or 8 tokens are chosen")
    width: int = option(256, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("fixed", "the length itself follows acceptance and time")
    verifier: VerifierName = option("rejection", "acceptance rule; with the invariant one the draft shares its noise")


def _speckv(parts: Parts, options: SpecKVOptions) -> Recipe:
    from outrider.control.gamma import GammaLength
    from outrider.grow.cost_aware import CallTimer
    from outrider.grow.stopping import Ladder

    timer, curve = CallTimer(), cost_curve(parts)
    paper = options.mode == "paper"
    lengths = GammaLength(
        lambda rows: curve.seconds(rows, 1, 0), lambda: timer.seconds(1),
        parts.target.traits.precision or "float32", paper=paper,
    )  # fmt: skip
    source = chain_source(parts, "draft-model", options.draft, options.width)
    name = "speckv (paper's objective: not a speed)" if paper else "speckv"
    return _stopping(name, parts, options, source, Ladder(lengths), timer=timer, kept=lengths)


def _stopping(
    name: str, parts: Parts, options: Any, source: Source, stop: Stop, *, marks: Marks | None = None,
    timer: CallTimer | None = None, kept: Remembers | None = None,
) -> Recipe:  # fmt: skip
    """Chains of this source, as long as the stop lets them be; `kept` is what of the stop outlives a request."""
    from outrider.draft.grown import Remembering
    from outrider.grow.stopping import Stopping

    shared = options.verifier == "invariant"
    grower = Stopping(stop, marks, frozenset(parts.loaded.eos_ids), shared, timer)
    drafter = Remembering(source, grower, True, shared, beside=parts.target.traits.other_threads, kept=kept)
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
        "speckv", "a chain of the length that is worth its time, from how sure its first tokens were",
        "arXiv 2605.02888", "model", True, "a draft model (default: shipped, or the target's first layers)",
        SpecKVOptions, _speckv, "control/gamma.py", lambda options: check_draft(options.draft), role=Role.RUNS,
        samples=True,
    ),
    MethodInfo(
        "specdec-plus-plus", "a chain that ends once a trained head thinks it was probably rejected",
        "arXiv 2405.19715", "model", True, "a trained acceptance head (outrider train run)", SpecDecOptions, _specdec,
        "grow/stopping.py", lambda options: check_drafter(ACCEPTANCE, options.head), role=Role.RUNS, samples=True,
    ),
)  # fmt: skip
