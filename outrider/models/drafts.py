"""Draft models made of a target's own layers: a folder with those layers, trained; the rest is the target's, shared.

The file holds the layers and the final norm, in half precision; embeddings and head are the target's tensors, not
copies. A draft belongs to one target: another fingerprint is refused, since the layers would mean nothing there.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import InputError
from outrider.models.load import LoadedModel
from outrider.models.truncate import chosen_layers, layer_list

WEIGHTS, CARD = "model.safetensors", "drafter.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class DraftCard:
    """What a folder says of its draft: whose it is, which layers it began as, how it was made, how well it does."""

    target: str
    fingerprint: str
    layers: tuple[int, ...]
    recipe: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    licence: str = ""


def new_draft(target: LoadedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """The untrained draft: copies of the target's layers and final norm in float32, everything else shared."""
    draft = chosen_layers(target.model, layers)
    for owner, key in _own(draft).values():
        owner._parameters[key] = nn.Parameter(owner._parameters[key].detach().float().clone(), requires_grad=False)
    return draft


def own_parameters(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What belongs to the draft alone, by name."""
    return {name: owner._parameters[key] for name, (owner, key) in _own(draft).items()}


def save_draft(folder: Path, draft: PreTrainedModel, card: DraftCard, dtype: torch.dtype = torch.float16) -> None:
    """Changes the folder: the weights first, the card last, so that a folder with a card is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().to("cpu", dtype).contiguous() for n, w in own_parameters(draft).items()}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        save_file(weights, Path(scratch) / WEIGHTS, {"format": "pt", "target": card.fingerprint})
        (Path(scratch) / CARD).write_text(json.dumps({"format": FORMAT, **asdict(card)}, indent=1) + "\n")
        for name in (WEIGHTS, CARD):
            os.replace(Path(scratch) / name, folder / name)


def read_card(folder: Path) -> DraftCard:
    try:
        stored = json.loads((folder / CARD).read_text())
        if stored.pop("format") != FORMAT:
            raise InputError(f"{folder}: a draft of another format; train it again with this version")
        return DraftCard(**{**stored, "layers": tuple(stored["layers"])})
    except OSError:
        raise InputError(f"{folder}: no draft here ({CARD} is missing); give the folder of a trained draft") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder}: {CARD} cannot be read ({error}); train the draft again") from error


def load_draft(folder: Path | str, target: LoadedModel) -> PreTrainedModel:
    """The draft in the target's precision, on its device, sharing its embeddings and head."""
    folder = Path(folder)
    card = read_card(folder)
    if card.fingerprint != target.fingerprint:
        raise InputError(
            f"{folder}: this draft was trained for {card.target!r} ({card.fingerprint}), not for "
            f"{target.name!r} ({target.fingerprint}); train one for it with: outrider train distill"
        )
    try:
        stored: dict[str, Tensor] = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: {WEIGHTS} cannot be read ({error}); train the draft again") from error
    draft = chosen_layers(target.model, card.layers)
    if {n: w.shape for n, w in stored.items()} != {n: w.shape for n, w in own_parameters(draft).items()}:
        raise InputError(f"{folder}: {WEIGHTS} does not hold the layers that {CARD} names; train the draft again")
    for name, (owner, key) in _own(draft).items():
        like = owner._parameters[key]
        owner._parameters[key] = nn.Parameter(stored[name].to(like.device, like.dtype), requires_grad=False)
    return draft


def shipped_draft(target: LoadedModel) -> Path | None:
    """The folder of the draft that comes with the package for exactly this target, if there is one."""
    home = Path(str(files("outrider"))) / "data" / "drafts"
    for card in sorted(home.glob(f"*/{CARD}")):
        if read_card(card.parent).fingerprint == target.fingerprint:
            return card.parent
    return None


def _own(draft: PreTrainedModel) -> dict[str, tuple[Any, str]]:
    """Every parameter that a draft does not share, as (module, key): those of its layers and of the norm after them."""
    path, _ = layer_list(draft)
    trunk = path.rpartition(".")[0]
    norms = [f"{trunk}.{name}" for name, _ in draft.get_submodule(trunk).named_children() if "norm" in name.lower()]
    return {
        f"{name}.{key}": (module, key)
        for name, module in draft.named_modules()
        if name.startswith((f"{path}.", *norms))
        for key, weight in module._parameters.items()
        if weight is not None
    }
