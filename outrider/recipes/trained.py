"""Methods whose drafter is a small network trained on the target's hidden states.

Without a drafter named, the one that comes with the package for this target is used; where there is none, the method
says how to train one and decodes without speculation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import InputError
from outrider.methods import MethodInfo, Parts, option
from outrider.protocols import Grower, Recipe
from outrider.recipes.common import CONTROLLER_HELP, ControllerName, VerifierName, at_least, controller, verifier

if TYPE_CHECKING:
    from outrider.draft.eagle3_layer import Eagle3Layer
    from outrider.models import LoadedModel

log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    drafter: str = option("", "folder made by `outrider train run`; empty: the one shipped for this target")
    budget: int = option(24, "most candidates a step")
    depth: int = option(6, "how deep a tree may be")
    grower: Literal["auto", "topk", "dyspec", "cost-aware", "chain"] = option(
        "auto", "how the tree grows; auto: topk where nothing is drawn, else dyspec"
    )
    beam: int = option(10, "topk: nodes expanded at each depth")
    width: int = option(64, "how many of the likeliest tokens a draft row keeps")
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("recursive", "acceptance rule; the invariant one drafts without sampling")


def load_eagle3(folder: Path, target: LoadedModel) -> Eagle3Layer:
    """The network in the target's precision, on its device."""
    from outrider.draft.eagle3_layer import Eagle3Layer, Eagle3Shape
    from outrider.models.drafts import CARD, WEIGHTS, read_drafter, unpacked

    card, stored = read_drafter(folder, target, "eagle3")
    try:
        net = Eagle3Layer.from_tensors(Eagle3Shape.from_dict(card.shape), unpacked(stored))
    except (KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{folder}: {WEIGHTS} does not hold what {CARD} says ({error}); train it again") from error
    return net.to(target.device, target.model.dtype)


def _eagle3(parts: Parts, options: Eagle3Options) -> Recipe:
    from outrider.draft.eagle3 import Eagle3Source
    from outrider.draft.grown import Grown
    from outrider.target.packed import PackedLinears

    at_least("depth", options.depth, 1)
    at_least("width", options.width, 1)
    at_least("beam", options.beam, 1)
    depth = options.budget if options.grower == "chain" else options.depth
    budget = controller(options.controller, options.budget, depth)
    net = _net(parts, options.drafter)
    if net is None:
        return Recipe("eagle3", None, verifier(options.verifier), controller("fixed", 0))
    source = Eagle3Source(
        net, parts.loaded.model.get_input_embeddings(), width=options.width, active=PackedLinears(net).active
    )
    sampled = options.verifier != "invariant"
    return Recipe("eagle3", Grown(source, _grower(parts, options), sampled), verifier(options.verifier), budget)


def _net(parts: Parts, named: str) -> Any:
    """The network, loaded once for all methods of one target; None where there is none to load."""
    from outrider.models.drafts import shipped_draft

    folder = Path(named) if named else shipped_draft(parts.loaded, "eagle3")
    if folder is None:
        log.warning(
            "no eagle3 drafter comes with the package for %s, decoding without one; train it with: outrider train data "
            "--model MODEL --out DATA, then outrider train run --kind eagle3 --model MODEL --data DATA --out DRAFTER",
            parts.loaded.name,
        )
        return None
    key = ("eagle3", str(folder))
    if key not in parts.drafts:
        parts.drafts[key] = load_eagle3(folder, parts.loaded)
    return parts.drafts[key]


def _grower(parts: Parts, options: Eagle3Options) -> Grower:
    if options.grower == "chain":
        from outrider.grow.chain import Chain

        return Chain()
    if options.grower == "dyspec":
        from outrider.grow.dyspec import Threshold

        return Threshold(options.depth)
    if options.grower == "cost-aware":
        from outrider.control.cost import stored
        from outrider.grow.cost_aware import CostAware

        runtime = f"{type(parts.target).__name__} {parts.loaded.model.dtype}"
        curve = stored(parts.target, parts.loaded.fingerprint, runtime)
        return CostAware(curve.seconds, length=parts.target.length, depth=options.depth)
    from outrider.grow.dyspec import Threshold
    from outrider.grow.either import Either
    from outrider.grow.topk import TopK

    ranked = TopK(beam=options.beam, branch=max(options.beam, 10), depth=options.depth)
    return ranked if options.grower == "topk" else Either(ranked, Threshold(options.depth))


RECIPES = (
    MethodInfo(
        "eagle3", "one trained layer goes on from the target's hidden states; a dynamic tree",
        "arXiv 2503.01840; arXiv 2406.16858", "feature", True, "a trained drafter (shipped for smollm2)",
        Eagle3Options, _eagle3, "draft/eagle3.py",
    ),
)  # fmt: skip
