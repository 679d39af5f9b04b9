"""Loading what was trained to draft: a finished drafter's folder becomes its network, in the target's precision.

`NETWORKS` names the families of small networks that read hidden states; Kangaroo's adapter is a model.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models.drafts import CARD, WEIGHTS, read_drafter, unpacked
from outrider.models.kept import find_drafter
from outrider.models.load import LoadedModel
from outrider.models.networks.acceptance import AcceptanceHead
from outrider.models.networks.block import BlockShape, DeerNet, DFlashNet
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.networks.fspad import FspadLayer, FspadShape
from outrider.models.networks.heads import HeadsShape, HydraHeads, MedusaHeads
from outrider.models.networks.kangaroo import filled_kangaroo
from outrider.models.networks.prompt_rows import PromptRows, PromptShape

KANGAROO = "kangaroo"
ACCEPTANCE = "acceptance-head"  # judges another drafter
Make = Callable[[Any, dict[str, Tensor], LoadedModel], Any]  # a card's shape, the tensors and their target -> a network


def load_trained(kind: str, folder: Path, target: LoadedModel) -> Any:
    """The network in the target's precision, on its device; refused where kind, target or tensors do not fit."""
    card, stored = read_drafter(folder, target, kind)
    try:
        return NETWORKS[kind](card.shape, unpacked(stored), target)
    except (KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{folder}: {WEIGHTS} does not hold what {CARD} says ({error}); train it again") from error


def load_eagle3(folder: Path, target: LoadedModel) -> Eagle3Layer:
    return load_trained("eagle3", folder, target)


def drafter_of(target: LoadedModel, kind: str, named: str, made: MutableMapping[Any, Any]) -> Any:
    """The network, loaded once for all who share `made`; refused with the remedy where there is none."""
    if (kind, named) not in made:
        folder = find_drafter(target, kind, named)
        if folder is None:
            raise no_drafter(kind, repr(target.name))
        made[kind, named] = load_trained(kind, folder, target)
    return made[kind, named]


def no_drafter(kind: str, target: str = "any model") -> InputError:
    add = "; or add a published one with: outrider drafters add FOLDER_OR_HUB_ID --model MODEL" * (kind == "eagle3")
    return InputError(
        f"no {kind} drafter is kept or shipped for {target}; train one with: outrider train data --model MODEL "
        f"--out DATA, then outrider train run --kind {kind} --model MODEL --data DATA{add}"
    )


def target_head(target: LoadedModel, ids: Tensor, dtype: Any = None) -> nn.Linear:
    """The target's own head over these tokens: its very weights where they are all, else a copy of some.

    With a dtype it is frozen as well, and copied only where the target's is another.
    """
    whole = target.model.get_output_embeddings()
    every = len(ids) == len(whole.weight)
    head = nn.Linear(whole.weight.shape[1], len(ids), bias=whole.bias is not None, device="meta")
    for name, weight in whole.named_parameters(recurse=False):
        if not every or dtype is not None:
            rows = weight if every else weight.detach()[ids.to(weight.device)]
            weight = nn.Parameter(rows.detach().to(dtype or weight.dtype), requires_grad=False)
        setattr(head, name, weight)
    return head


def _whole(network: Any, shape: Any, stored: Any, tensors: dict[str, Tensor], target: LoadedModel) -> nn.Module:
    """A network with a head of its own."""
    return network.from_tensors(shape.from_dict(stored), tensors).to(target.device, target.dtype)


def _headed(network: Any, shape: Any, stored: Any, tensors: dict[str, Tensor], target: LoadedModel) -> nn.Module:
    """A network that ends in the target's head."""
    net = network.from_tensors(shape.from_dict(stored), tensors, partial(target_head, target))
    return net.to(target.device, target.dtype)


def _kangaroo(stored: Any, tensors: dict[str, Tensor], target: LoadedModel) -> nn.Module:
    return filled_kangaroo(target.model, int(stored.get("layer", 0)), tensors)


def _acceptance(stored: Any, tensors: dict[str, Tensor], target: LoadedModel) -> nn.Module:
    return AcceptanceHead.from_tensors(stored, tensors).to(target.device)


NETWORKS: dict[str, Make] = {
    "eagle3": partial(_whole, Eagle3Layer, Eagle3Shape),
    "eagle2": partial(_headed, Eagle2Layer, Eagle3Shape),
    "fspad": partial(_headed, FspadLayer, FspadShape),
    "medusa": partial(_headed, MedusaHeads, HeadsShape),
    "hydra": partial(_headed, HydraHeads, HeadsShape),
    "ppd": partial(_whole, PromptRows, PromptShape),
    "dflash": partial(_headed, DFlashNet, BlockShape),
    "deer": partial(_headed, DeerNet, BlockShape),
    KANGAROO: _kangaroo,
    ACCEPTANCE: _acceptance,
}
