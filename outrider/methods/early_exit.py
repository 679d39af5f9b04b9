"""Methods that draft with the target's own first layers: as they are, with a trained adapter, or leaving where it pays.

The layers share the target's weights and have a cache of their own; the target's verification runs all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.core.errors import InputError
from outrider.core.protocols import Drafter, Recipe
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

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.models import LoadedModel

STOP_HELP = "drafting ends with the first token behind which none has a chance as large as this; 0: never"


@dataclass(frozen=True, slots=True)
class ChainOptions(Options):
    budget: int = budget_option(6)
    threshold: float = option(0.6, STOP_HELP, least=0)  # above 1 one token is drafted
    width: int = option(256, "how many of the likeliest tokens a draft row keeps", least=1)
    controller: ControllerName = option("payoff", CONTROLLER_HELP)
    verifier: VerifierName = option("rejection", "acceptance rule; the invariant one drafts without sampling")


@dataclass(frozen=True, slots=True)
class EarlyExitOptions(ChainOptions):
    layers: int = option(0, "how many of the target's first layers draft; 0: a quarter", least=0)


@dataclass(frozen=True, slots=True)
class KangarooOptions(ChainOptions):
    drafter: str = option("", "folder made by `outrider train run --kind kangaroo`")


@dataclass(frozen=True, slots=True)
class DelOptions(Options):
    exits: str = option(
        "", "layers after which drafting may leave, such as 4,8,15; empty: an eighth, a quarter, a half"
    )
    budget: int = budget_option(12, "longest chain")
    width: int = option(256, "how many of the likeliest tokens a draft row keeps", least=1)
    verifier: VerifierName = option("rejection", "acceptance rule; the invariant one drafts without sampling")

    def check(self) -> None:
        _layers(self.exits)


def depth_of(target: LoadedModel) -> int:
    return int(target.model.config.get_text_config().num_hidden_layers)


def _chain(parts: Parts, draft: Any, name: str, options: Any) -> tuple[Drafter, Any]:
    """A drafter that unrolls this model until it doubts, and what says where that is."""
    from outrider.draft.grown import Grown
    from outrider.draft.model.draft_model import ModelSource
    from outrider.grow.confident import Confident

    stop = Confident(getattr(options, "threshold", 0.0))
    source = ModelSource(parts.runtime(draft), options.width, name)
    return Grown(source, stop, sampled=options.verifier != "invariant"), stop


def _early_exit(parts: Parts, options: EarlyExitOptions) -> Recipe:
    from outrider.models import first_layers

    total = depth_of(parts.loaded)
    count = options.layers or max(total // 4, 1)
    if not 1 <= count < total:
        raise InputError(f"option layers is {options.layers}; the target has {total}, use 1..{total - 1}")
    drafter, _ = _chain(parts, _shared(parts, count, first_layers), "early-exit", options)
    return Recipe("early-exit", drafter, verifier(options.verifier), controller(options.controller, options.budget))


def _shared(parts: Parts, count: int, first_layers: Any) -> Any:
    key = ("", count)
    if key not in parts.drafts:
        parts.drafts[key] = first_layers(parts.loaded.model, count)
    return parts.drafts[key]


def _kangaroo(parts: Parts, options: KangarooOptions) -> Recipe:
    from outrider.models.trained import KANGAROO, drafter_of

    draft = drafter_of(parts.loaded, KANGAROO, options.drafter, parts.drafts)
    drafter, _ = _chain(parts, draft, KANGAROO, options)
    return Recipe(KANGAROO, drafter, verifier(options.verifier), controller(options.controller, options.budget))


def _del(parts: Parts, options: DelOptions) -> Recipe:
    from outrider.draft.model.early_exit import DynamicExit
    from outrider.models import first_layers

    total = depth_of(parts.loaded)
    chains = {layer: _chain(parts, _shared(parts, layer, first_layers), "del", options)
              for layer in _exits(options.exits, total)}  # fmt: skip
    head, layer = _sizes(parts.loaded)
    drafter = DynamicExit(
        {at: chain for at, (chain, _) in chains.items()}, exit_reader(parts.loaded), layers=total, head=head / layer,
        longest=options.budget, stops={at: stop for at, (_, stop) in chains.items()},
    )  # fmt: skip
    return Recipe("del", drafter, verifier(options.verifier), controller("fixed", options.budget))


def _exits(text: str, total: int) -> list[int]:
    if not text:
        return sorted({max(1, total // part) for part in (8, 4, 2)} - {total}) or [1]
    exits = _layers(text)
    if exits[-1] >= total:
        raise InputError(f"option exits is {text!r}; use layers of 1..{total - 1} such as {max(1, total // 4)}")
    return exits


def _layers(text: str) -> list[int]:
    """ "4,8,15", sorted."""
    try:
        layers = sorted({int(part) for part in text.split(",")}) if text else []
    except ValueError:
        layers = [0]
    if layers and layers[0] < 1:
        raise InputError(f"option exits is {text!r}; use layers from 1 such as 4,8,15")
    return layers


def _sizes(target: LoadedModel) -> tuple[float, float]:
    """Parameters of the head and of one layer: what a pass over each costs, near enough."""
    from outrider.models.truncate import layer_list

    path, total = layer_list(target.model)
    layers = sum(weight.numel() for weight in target.model.get_submodule(path).parameters())
    return float(target.model.get_output_embeddings().weight.numel()), layers / total


def exit_reader(target: LoadedModel) -> Any:
    """States after some layer -> what the target's final norm and head make of them: (likeliest token, its chance)."""
    from outrider.models.truncate import final_norm

    norm, head = final_norm(target.model), target.model.get_output_embeddings()

    def read(states: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(norm(states)).float()
        best = logits.max(-1)
        return best.indices, (best.values - logits.logsumexp(-1)).exp()

    return read


RECIPES = (
    MethodInfo(
        "early-exit", "the target's first layers and its head draft a chain until they doubt", "arXiv 2404.16710",
        "model", True, "nothing (a model trained for early exits does best)", EarlyExitOptions, _early_exit,
        "grow/confident.py", role=Role.RUNS, samples=True,
    ),
    MethodInfo(
        "del", "early exit whose layer and length are chosen by expected tokens a layer, step by step",
        "arXiv 2504.05598", "model", True, "nothing (a model trained for early exits does best)", DelOptions, _del,
        "draft/model/early_exit.py", role=Role.RUNS, samples=True,
    ),
    MethodInfo(
        "kangaroo", "the target's first layers with a trained adapter draft a chain until they doubt",
        "arXiv 2404.18911", "model", True, "a trained drafter (outrider train run)", KangarooOptions, _kangaroo,
        "models/networks/kangaroo.py", lambda options: check_drafter("kangaroo", options.drafter),
        role=Role.RUNS, samples=True,
    ),
)  # fmt: skip
