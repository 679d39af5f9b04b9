"""Memory: what drafters learnt, kept in one file between runs.

The file holds plain arrays (safetensors, no pickle), the fingerprint of the model they belong to and a checksum. It is
replaced whole or not at all. A torn, foreign or unreadable file is ignored with a warning: memory makes drafting
better, it is never a reason to fail.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from outrider.errors import InputError
from outrider.files import check_writable, write_atomic
from outrider.protocols import Drafter, Remembers

log = logging.getLogger("outrider")
FORMAT = 1
Arrays = dict[str, NDArray[Any]]


def write_memory(path: Path, arrays: Mapping[str, NDArray[Any]], model: str) -> None:
    """`model` is the fingerprint of the target whose texts these are."""
    body = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    head = {"outrider-memory": FORMAT, "model": model, "sha256": hashlib.sha256(body).hexdigest()}
    write_atomic(path, json.dumps(head).encode() + b"\n" + body)


def read_memory(path: Path, model: str) -> Arrays:
    """The arrays of the file; none, with a warning that says why, where it cannot be used.

    A place where nothing could ever be written is refused now, before work is done that would be lost.
    """
    check_writable(path)
    if not path.exists():
        return {}
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        found = json.loads(head)
        if found.get("outrider-memory") != FORMAT:
            return _ignored(path, "it is not a memory of this version")
        if found.get("sha256") != hashlib.sha256(body).hexdigest():
            return _ignored(path, "it is torn or damaged")
        if found.get("model") != model:
            return _ignored(path, "it was learnt from another model")
        return dict(load(body))
    except OSError as error:
        return _ignored(path, error.strerror or str(error))
    except Exception:  # whatever bytes are in it
        return _ignored(path, "it is not a memory file")


def recall(drafter: Drafter | None, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Changes the drafter: what `collect` found of it before. Arrays that do not fit it are ignored with a warning."""
    if drafter is None or not isinstance(drafter, Remembers):
        return
    prefix = f"{drafter.name}/"
    own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if own:
        try:
            drafter.remember(own)
        except InputError as error:
            log.warning("the kept memory of %s is not used: %s", drafter.name, error)
            drafter.forget()


def collect(drafters: Iterable[Drafter | None]) -> Arrays:
    """All that these drafters would keep, each array under its drafter's name."""
    return {
        f"{drafter.name}/{name}": array
        for drafter in drafters
        if drafter is not None and isinstance(drafter, Remembers)
        for name, array in drafter.memory().items()
    }


def _ignored(path: Path, why: str) -> Arrays:
    log.warning("the memory %s is ignored: %s", path, why)
    return {}
