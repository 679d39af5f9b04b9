"""What recipes share: acceptance rules and controllers by name, the target's cost, and checks of option values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from outrider.core.errors import InputError
from outrider.core.protocols import Controller, Target, Verifier
from outrider.core.records import Budget
from outrider.methods import Parts, option
from outrider.runtime.progress import told_if_compiling as told_if_compiling
from outrider.runtime.progress import told_if_slow as told_if_slow

if TYPE_CHECKING:
    from outrider.control.cost import CostCurve
    from outrider.control.cost_model import CostModel
    from outrider.models import LoadedModel

log = logging.getLogger("outrider")
VerifierName = Literal[
    "invariant", "rejection", "recursive", "naive", "k-seq", "optimal", "transport", "block", "traversal"
]
ControllerName = Literal["payoff", "fixed", "bandit"]
CONTROLLER_HELP = "payoff: as much as has paid so far; fixed: the whole budget; bandit: in the tail of a rollout only"
MAX_CANDIDATES = 4096
LEAST_BYTES = 1 << 12  # hold a few dozen entries of any table
AUTO = "auto"
Candidates = int | Literal["auto"]


def budget_option(default: int | str, help: str = "most candidates a step") -> Any:
    """The option `budget`."""
    auto = f" {AUTO}," if default == AUTO else ""
    remedy = f"use 1 to {MAX_CANDIDATES},{auto} or the method plain for none"
    return option(default, help, least=1, most=MAX_CANDIDATES, remedy=remedy)


def verifier(name: str) -> Verifier:
    match name:
        case "rejection":
            from outrider.verify.rejection import Rejection

            return Rejection()
        case "recursive":
            from outrider.verify.recursive import Recursive

            return Recursive()
        case "naive":
            from outrider.verify.naive import Naive

            return Naive()
        case "k-seq":
            from outrider.verify.kseq import KSeq

            return KSeq()
        case "optimal":
            from outrider.verify.optimal import Optimal

            return Optimal()
        case "transport":
            from outrider.verify.transport import Transport

            return Transport()
        case "block":
            from outrider.verify.block import Block

            return Block()
        case "traversal":
            from outrider.verify.traversal import Traversal

            return Traversal()
    from outrider.verify.invariant import Invariant

    return Invariant()


def controller(name: str, nodes: int, depth: int | None = None) -> Controller:
    """`depth` is how deep a tree of all the nodes is meant to be; a chain without it."""
    if name == "payoff":
        from outrider.control.payoff import Payoff

        return Payoff(nodes, breadth=max(1, nodes // (depth or nodes)))
    if name == "bandit":
        from outrider.control.bandit import Bandit, arms_of

        return Bandit(arms_of(Budget(nodes, depth or nodes)))
    from outrider.control.fixed import Fixed

    return Fixed(Budget(nodes, depth or nodes))


def wide_steps(parts: Parts) -> bool:
    """Whether many rows cost little more than one, so that large trees are the better default: on a GPU."""
    return parts.target.device.type == "cuda"


def embedding(target: Target, loaded: LoadedModel) -> Callable[[Any], Any]:
    """The target's: the runtime's where the model is not in memory, and need not be for this."""
    held = getattr(getattr(target, "backend", None), "embed", None)
    if held is None or loaded.in_memory:
        return cast("Callable[[Any], Any]", loaded.model.get_input_embeddings())
    return cast("Callable[[Any], Any]", held)


def cost_curve(parts: Parts) -> CostCurve:
    """What a step of this target takes on this machine; measured the first time, then kept."""
    if parts.cost is not None:
        return cast("CostCurve", parts.cost)
    from outrider.control.cost import stored
    from outrider.models.files.phases import phase

    precision = parts.target.traits.precision or parts.loaded.dtype
    runtime = f"{parts.target.traits.runtime} {precision}"
    telling = told_if_slow("timing steps of the model on this machine; later starts find the times in the cache")
    with phase("time steps"):
        return stored(parts.target, parts.loaded.fingerprint, runtime, measuring=telling)


def cost_model(parts: Parts) -> CostModel:
    """The one model of what this target's steps take, shared by all methods that ask for it."""
    from outrider.control.cost_model import CostModel
    from outrider.control.experts import ExpertUse

    if "cost model" not in parts.drafts:
        traits, experts = parts.target.traits, None
        try:
            measured = cost_curve(parts)
            curve: Callable[[int], float] = measured.seconds
            if measured.experts is not None and traits.active_experts is not None:
                experts = ExpertUse(traits.active_experts, measured.experts)
        except InputError:  # all slots are busy: every size is tried and learnt from
            curve = _unknown
        parts.drafts["cost model"] = CostModel(curve, traits.width, traits.even, experts)
    return cast("CostModel", parts.drafts["cost model"])


def _unknown(rows: int) -> float:
    return 1.0


def check_draft(named: str) -> None:
    """Refuse what is neither a draft that was trained nor a model; a hub id is believed until it is loaded."""
    from outrider.models import check_source
    from outrider.models.drafts import CARD, LAYERS, card_of

    if (Path(named) / CARD).is_file():
        card_of(Path(named), LAYERS)
    elif named:
        check_source(named)


def check_drafter(kind: str, named: str) -> None:
    """Refuse a folder or a name without a drafter of this kind, and none at all where no target has one of the kind."""
    from outrider.models.drafts import card_of
    from outrider.models.kept import all_drafters, named_folder
    from outrider.models.trained import no_drafter

    if named:
        card_of(named_folder(named), kind)
    elif kind not in {drafter.card.kind for drafter in all_drafters()}:
        raise no_drafter(kind)


def check_store(folder: str) -> None:
    """Refuse a folder that is no store; whose tokens it holds is looked at when the model is there."""
    from outrider.store.store import open_store

    if folder:
        open_store(folder)


def expansion(name: str, text: str) -> tuple[int, ...]:
    """ "4,2,1": children at each depth."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"option {name} is {text!r}; use positive numbers such as 4,2,1")
    return sizes
