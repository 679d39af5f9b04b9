"""Trained drafters on disk: a folder with a card and the weights that are the drafter's own; the rest is the target's.

A draft model made of the target's layers keeps those layers and the final norm, in half precision; other kinds keep
the tensors their own code names, in half precision or in eight bits a row. A drafter belongs to one target: another
fingerprint is refused, since the weights would mean nothing there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.models.load import LoadedModel
from outrider.models.networks.shared_head import MAP as MAP
from outrider.models.small import load_small
from outrider.models.truncate import chosen_layers, layer_list

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS, CARD = "model.safetensors", "drafter.json"
FORMAT = 1
LAYERS = "draft-model"  # the kind made of the target's own layers
SCALE = ".scale"  # the scales of a matrix that is kept in eight bits, one a row


@dataclass(frozen=True, slots=True)
class DraftCard:
    """What a folder says of its drafter: whose it is, how it was made, how well it does."""

    target: str
    fingerprint: str
    layers: tuple[int, ...]  # of the target: those it began as, or those whose features it reads
    recipe: dict[str, Any] = field(default_factory=dict)
    acceptance: dict[str, Any] = field(default_factory=dict)
    licence: str = ""
    kind: str = LAYERS
    shape: dict[str, Any] = field(default_factory=dict)  # sizes of a network of its own
    origin: str = ""  # where a kept one comes from
    date: str = ""  # when it was kept


def new_draft(target: LoadedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """The untrained draft: copies of the target's layers and final norm in float32, everything else shared."""
    draft = chosen_layers(target.model, layers)
    for owner, key in _parameters_of(draft).values():
        owner._parameters[key] = nn.Parameter(owner._parameters[key].detach().float().clone(), requires_grad=False)
    return draft


def drafter_parameters(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What belongs to the draft alone, by name."""
    return {name: owner._parameters[key] for name, (owner, key) in _parameters_of(draft).items()}


def save_draft(folder: Path, draft: PreTrainedModel, card: DraftCard, dtype: torch.dtype = torch.float16) -> None:
    """Changes the folder."""
    write_drafter(
        folder, {n: w.detach().to("cpu", dtype).contiguous() for n, w in drafter_parameters(draft).items()}, card
    )


def write_drafter(folder: Path, weights: dict[str, Tensor], card: DraftCard) -> None:
    """Changes the folder: the weights first, the card last, so that a folder with a card is complete."""
    folder.mkdir(parents=True, exist_ok=True)
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
    card, stored = read_drafter(folder, target, LAYERS)
    if card.shape:
        return _small(folder, target, card, stored)
    draft = chosen_layers(target.model, card.layers)
    if {n: w.shape for n, w in stored.items()} != {n: w.shape for n, w in drafter_parameters(draft).items()}:
        raise InputError(f"{folder}: {WEIGHTS} does not hold the layers that {CARD} names; train the draft again")
    for name, (owner, key) in _parameters_of(draft).items():
        like = owner._parameters[key]
        owner._parameters[key] = nn.Parameter(stored[name].to(like.device, like.dtype), requires_grad=False)
    return draft


def _small(folder: Path, target: LoadedModel, card: DraftCard, stored: dict[str, Tensor]) -> PreTrainedModel:
    try:
        return load_small(target.model, card.shape, unpacked(stored))
    except (KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{folder}: {WEIGHTS} does not hold what {CARD} says ({error}); train it again") from error


def read_drafter(folder: Path, target: LoadedModel, kind: str) -> tuple[DraftCard, dict[str, Tensor]]:
    """The card and the tensors as stored; refused where kind or target are others."""
    card, again = card_of(folder, kind), _again(kind)
    if card.fingerprint != target.fingerprint:
        raise InputError(
            f"{folder}: this draft was trained for {card.target!r} ({card.fingerprint}), not for "
            f"{target.name!r} ({target.fingerprint}); train one for it with: {again}"
        )
    try:
        return card, load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: {WEIGHTS} cannot be read ({error}); train the draft again") from error


def digest_of(folder: Path) -> str:
    """Tells one drafter's stored weights from another's."""
    try:
        return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise InputError(f"{folder}: {WEIGHTS} cannot be read ({error}); train the draft again") from error


def card_of(folder: Path, kind: str) -> DraftCard:
    """The card of a drafter of this kind; another is refused."""
    card = read_card(folder)
    if card.kind != kind:
        raise InputError(f"{folder}: holds a drafter of kind {card.kind}, not {kind}; train one with: {_again(kind)}")
    return card


def _again(kind: str) -> str:
    return "outrider train distill" if kind == LAYERS else f"outrider train run --kind {kind}"


def packed(weights: dict[str, Tensor], eight_bits: bool) -> dict[str, Tensor]:
    """For storing: half precision, or matrices as int8 with one scale a row. Integers stay as they are."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        weight = weight.detach().cpu()
        if not weight.is_floating_point():
            stored[name] = weight.contiguous()
        elif eight_bits and weight.ndim == 2:
            scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            stored[name] = (weight.float() / scale).round().to(torch.int8)
            stored[name + SCALE] = scale
        else:
            stored[name] = weight.half().contiguous()
    return stored


def unpacked(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `packed` stored, in float32."""
    return {
        name: weight.float() * stored[name + SCALE] if name + SCALE in stored
        else weight.float() if weight.is_floating_point() else weight
        for name, weight in stored.items() if not name.endswith(SCALE)
    }  # fmt: skip


def shipped_folders() -> list[Path]:
    """Of all drafters that come with the package."""
    home = Path(str(files("outrider"))) / "data" / "drafts"
    return sorted(card.parent for card in home.glob(f"*/{CARD}"))


def shipped_draft(target: LoadedModel, kind: str = LAYERS) -> Path | None:
    """The folder of the drafter that comes with the package for exactly this target, if there is one."""
    wanted = (target.fingerprint, kind)
    cards = ((place, read_card(place)) for place in shipped_folders())
    return next((place for place, card in cards if (card.fingerprint, card.kind) == wanted), None)


def _parameters_of(draft: PreTrainedModel) -> dict[str, tuple[Any, str]]:
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
