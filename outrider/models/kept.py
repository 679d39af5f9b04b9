"""Drafters of the user's, kept in the data folder under the fingerprint of their target, where methods find them.

`drafters/FINGERPRINT/NAME/` holds what any drafter's folder holds. A name is the kind and a digest of weights and
shape, so that keeping a drafter twice keeps one. What cannot be read is told once and passed over: a method never fails
because of a drafter that nobody named.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch
from platformdirs import user_data_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from outrider.core.errors import InputError, UnknownName
from outrider.models import drafts
from outrider.models.drafts import CARD, LAYERS, MAP, SCALE, WEIGHTS, DraftCard, read_card, write_drafter
from outrider.models.load import LoadedModel

log = logging.getLogger("outrider")
SHIPPED = "comes with the package"


@dataclass(frozen=True, slots=True)
class Kept:
    """A drafter on this machine."""

    folder: Path
    card: DraftCard
    shipped: bool = False

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())

    @property
    def parameters(self) -> int:
        """Numbers that were learnt: neither scales nor maps of the vocabulary."""
        shapes = _shapes(self.folder)
        learnt = [shape for name, shape in shapes.items() if name != MAP and not name.endswith(SCALE)]
        return sum(int(torch.Size(shape).numel()) for shape in learnt)


def drafters_folder() -> Path:
    return user_data_path("outrider") / "drafters"


def keep(folder: Path, origin: str) -> Kept:
    """Changes the data folder: a copy of a finished drafter, found by the methods of its target from now on."""
    card = read_card(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: {WEIGHTS} cannot be read ({error}); train the draft again") from error
    return keep_tensors(weights, replace(card, origin=origin))


def keep_tensors(weights: dict[str, Tensor], card: DraftCard) -> Kept:
    """Changes the data folder, as `keep` does; weights as they are stored."""
    card = replace(card, date=datetime.now(UTC).isoformat(timespec="microseconds"))
    folder = drafters_folder() / card.fingerprint / f"{card.kind}-{_digest(weights, card)}"
    try:
        write_drafter(folder, weights, card)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written ({error.strerror or error}); free space there or set XDG_DATA_HOME"
        ) from error
    return Kept(folder, card)


def kept(fingerprint: str = "*") -> list[Kept]:
    """The user's drafters of one target, or of all, newest first."""
    found = []
    for place in sorted(path.parent for path in drafters_folder().glob(f"{fingerprint}/*/{CARD}")):
        try:
            card = read_card(place)
            _shapes(place)
        except InputError as error:
            _tell(f"a drafter is passed over: {error}; or remove it: outrider drafters remove {place.name}")
            continue
        if card.fingerprint == place.parent.name:
            found.append(Kept(place, card))
    return sorted(found, key=lambda drafter: drafter.card.date, reverse=True)


def all_drafters() -> list[Kept]:
    """The user's, newest first, then those that come with the package."""
    shipped = [Kept(place, read_card(place), shipped=True) for place in drafts.shipped_folders()]
    return [*kept(), *shipped]


def find_drafter(target: LoadedModel, kind: str = LAYERS, named: str = "") -> Path | None:
    """The folder that is named, by its path or by the name it is kept under; else the user's newest one of this kind
    and target; else the shipped one; None where there is none."""
    if named:
        return named_folder(named)
    mine = [one.folder for one in kept(target.fingerprint) if one.card.kind == kind]
    return mine[0] if mine else drafts.shipped_draft(target, kind)


def named_folder(named: str) -> Path:
    """A path, or the place of a kept drafter; a path that leads nowhere is left to whoever reads it."""
    path = Path(named).expanduser()
    if path.exists() or path.name != named:
        return path
    return next((one.folder for one in all_drafters() if one.name == named), path)


def find_kept(name: str) -> Kept:
    """By its name or the beginning of it."""
    every = all_drafters()
    found = [one for one in every if one.name == name] or [one for one in every if one.name.startswith(name)]
    if not found or not name:
        known = ", ".join(one.name for one in every)
        raise UnknownName(f"no drafter {name!r}; there are: {known}")
    if len(found) > 1:
        raise InputError(f"{name!r} is the beginning of {', '.join(one.name for one in found)}; write more of one")
    return found[0]


def remove(name: str) -> None:
    """Changes the data folder. Takes whole names only, also of a drafter that cannot be read."""
    for place in (folder for folder in drafters_folder().glob("*/*") if folder.name == name):
        (place / CARD).unlink(missing_ok=True)  # first: a folder without a card is no drafter
        shutil.rmtree(place)
        return
    raise UnknownName(f"no drafter {name!r} is kept; `outrider drafters list` names those that are")


@cache  # every method that is built looks for drafters
def _tell(message: str) -> None:
    log.warning(message)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Of the tensors; only the head of the file is read, which also tells whether the rest is there."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: {WEIGHTS} cannot be read ({error}); train the draft again") from error


def _digest(weights: Mapping[str, Tensor], card: DraftCard) -> str:
    about = [card.fingerprint, card.kind, card.layers, card.shape]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name}{weight.dtype}{tuple(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]
