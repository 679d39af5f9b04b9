"""Memory: what drafters learnt, kept in one file between runs.

The file holds plain arrays (safetensors, no pickle), the fingerprint of the model they belong to and a checksum. It is
replaced whole or not at all, and only by what goes on from it: any other file is refused before work is done, since it
would be overwritten at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from outrider.core.errors import InputError
from outrider.core.files import check_place, write_atomic
from outrider.core.protocols import Controller, Drafter, Remembers

MARK, FORMAT = "outrider-memory", 1
DAMAGED = "is a memory, but torn or damaged"
Arrays = dict[str, NDArray[Any]]


def write_memory(path: Path, arrays: Mapping[str, NDArray[Any]], model: str) -> None:
    """`model` is the fingerprint of the target whose texts these are."""
    body = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    head = {MARK: FORMAT, "model": model, "sha256": hashlib.sha256(body).hexdigest()}
    write_atomic(path, json.dumps(head).encode() + b"\n" + body)


def read_memory(path: Path, model: str | None = None) -> Arrays:
    """The arrays of the file, none where there is no file yet; refused where it is not a memory of this `model`.

    Without a model, which may take long to load, whatever can be wrong with any is refused.
    """
    check_place(path, f"the memory {path}")
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror})") from None
    if not content:
        return {}
    head, _, body = content.partition(b"\n")
    try:
        about = json.loads(head)
        form = about[MARK]
    except (ValueError, TypeError, KeyError, RecursionError):
        torn = content.startswith(f'{{"{MARK}"'.encode()[: len(content)])
        raise _refused(path, DAMAGED if torn else "is another kind of file") from None
    if form != FORMAT:
        raise _refused(path, "was written by another version of Outrider")
    if about.get("sha256") != hashlib.sha256(body).hexdigest():
        raise _refused(path, DAMAGED)
    if model is not None and about.get("model") != model:
        raise _refused(path, "was learnt from another model")
    try:
        return dict(load(body))
    except SafetensorError:
        raise _refused(path, DAMAGED) from None


def recall(drafter: Drafter | Controller | None, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Changes the drafter: what `collect` found of it before. Raises where that does not fit, and leaves it as new."""
    if drafter is None or not isinstance(drafter, Remembers):
        return
    prefix = f"{drafter.name}/"
    kept = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if kept:
        try:
            drafter.remember(kept)
        except InputError as error:
            drafter.forget()
            raise InputError(f"the kept memory of {drafter.name} cannot be used: {error}") from error


def collect(drafters: Iterable[Drafter | Controller | None]) -> Arrays:
    """All that these drafters would keep, each array under its drafter's name."""
    return {
        f"{drafter.name}/{name}": array
        for drafter in drafters
        if drafter is not None and isinstance(drafter, Remembers)
        for name, array in drafter.memory().items()
    }


def _refused(path: Path, why: str) -> InputError:
    return InputError(f"{path}: {why}; name another file for the memory, or remove this one")
