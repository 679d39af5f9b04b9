"""Kept sizes: which sizes of passes a kind of model was asked for most on this device, from one start to the next.

So that a later start records first what it will need. A small file for each kind of model and device; one that cannot
be read or written costs time only.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path

from outrider.core.errors import InputError
from outrider.core.files import write_atomic
from outrider.models.known import digest, kind_of
from outrider.runtime.cuda.packing import ROWS, SEQUENCES, Bucket
from outrider.runtime.cuda.sizes.recordings import Size

log = logging.getLogger("outrider")
MAX_SIZES = 48  # sizes that are kept
FADE = 0.5  # what a start counts against the one after it


def place(model: Any, device: torch.device) -> Path:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    identity = [kind_of(model), str(model.dtype), name]
    return user_cache_path("outrider") / "passes" / f"{digest(identity)}.json"


def read(path: Path) -> dict[Size, int]:
    try:
        return {_size(entry): int(FADE * entry["uses"]) for entry in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write(path: Path, wanted: Mapping[Size, int]) -> None:
    entries = [
        {"sequences": size.bucket.sequences, "rows": size.bucket.rows, "scored": size.bucket.scored,
         "hidden": size.hidden, "top": size.top, "uses": uses}
        for size, uses in Counter(wanted).most_common(MAX_SIZES)
    ]  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(entries))
    except (OSError, InputError) as error:
        log.info("the sizes of passes could not be kept: %s", error)


def _size(entry: Mapping[str, Any]) -> Size:
    bucket = Bucket(int(entry["sequences"]), int(entry["rows"]), int(entry["scored"]))
    if bucket.sequences not in SEQUENCES or bucket.rows not in ROWS or not 0 < bucket.scored <= bucket.rows:
        raise ValueError("of another version")
    return Size(bucket, tuple(int(layer) for layer in entry["hidden"]), int(entry["top"]))
