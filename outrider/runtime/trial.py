"""A short trial of runtimes on this machine, remembered: which runs this model fastest.

Times single rows and trees of eight behind a short text through the protocol; a few dozen steps in all.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from platformdirs import user_cache_path

from outrider.core.errors import InputError
from outrider.core.files import write_atomic
from outrider.core.protocols import Target
from outrider.core.records import GREEDY, NO_NEEDS, Piece
from outrider.core.tree import fixed
from outrider.models.files.phases import phase
from outrider.models.known import digest, kind_of
from outrider.runtime.progress import told_if_slow

log = logging.getLogger("outrider")
ROWS, ROUNDS, TEXT = (1, 8), 7, 64


def remembered(model: Any, names: Sequence[str], precision: str | None = None) -> dict[str, float]:
    """Seconds of a step by runtime, of those of `names` that ran this kind of model here; empty: never measured."""
    return remembered_of(kind_of(model), str(model.dtype), names, precision)


def remembered_of(kind: list[str], dtype: str, names: Sequence[str], precision: str | None) -> dict[str, float]:
    """The same, of a model that is not in memory."""
    try:
        kept = json.loads(_path(kind, dtype, names, precision).read_text())
        return {name: float(kept[name]) for name in names if name in kept}
    except (OSError, ValueError, TypeError):
        return {}


def compared(
    model: Any, names: Sequence[str], targets: Mapping[str, Target], precision: str | None = None
) -> str:  # fmt: skip
    """The fastest of `targets`, which are those of `names` that run here; kept for later."""
    said = f"measuring which of {', '.join(targets)} runs this model fastest; done once and kept"
    with told_if_slow(said), phase("trial"):
        seconds = trial(targets)
    log.info("milliseconds of a step: %s", {name: round(1e3 * each, 1) for name, each in seconds.items()})
    path = _path(kind_of(model), str(model.dtype), names, precision)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(seconds))
    except (OSError, InputError) as error:
        log.info("the trial of runtimes could not be stored: %s", error)
    return min(targets, key=lambda name: seconds[name])


def _path(kind: list[str], dtype: str, names: Sequence[str], precision: str | None) -> Path:
    identity = [kind, dtype, sorted(names), precision, platform.processor() or platform.machine(),
                platform.node(), torch.get_num_threads(), torch.__version__]  # fmt: skip
    return user_cache_path("outrider") / "runtimes" / f"{digest(identity)}.json"


def trial(targets: Mapping[str, Target]) -> dict[str, float]:
    """Mean of the median seconds of a plain and of a wide step; rounds alternate, so a slow spell falls on all."""
    room = min(target.max_context for target in targets.values())
    sizes = tuple(rows for rows in ROWS if rows + 2 <= room) or ROWS[:1]
    length = max(0, min(TEXT, room - sizes[-1] - 1))
    slots: dict[str, int] = {}
    seen: dict[tuple[str, int], list[float]] = {}
    try:
        for name, target in targets.items():
            slots[name] = target.acquire()
            if length:
                target.run([Piece(slots[name], [i % target.vocab_size for i in range(length)])], NO_NEEDS)
        for again, rows, (name, target) in product(range(ROUNDS + 1), sizes, targets.items()):
            tree = fixed(np.arange(rows) % target.vocab_size, np.arange(rows) - 1)
            begun = time.perf_counter()
            target.run([Piece(slots[name], tree=tree)], GREEDY)
            if again:  # the first only warms up
                seen.setdefault((name, rows), []).append(time.perf_counter() - begun)
    finally:
        for name, slot in slots.items():
            targets[name].release(slot)
    return {name: sum(median(seen[name, rows]) for rows in sizes) / len(sizes) for name in targets}
