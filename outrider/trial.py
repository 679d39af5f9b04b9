"""A short trial of two runtimes on this machine, remembered: which runs this model faster.

Times single rows and trees of eight behind a short text through the protocol; a few dozen steps in all.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from platformdirs import user_cache_path

from outrider.conversions import digest, kind_of
from outrider.errors import InputError
from outrider.files import write_atomic
from outrider.protocols import Needs, Target
from outrider.recipes.common import told_if_slow
from outrider.tree import fixed

log = logging.getLogger("outrider")
ROWS, ROUNDS, TEXT = (1, 8), 7, 64


def faster(model: Any, name: str, made: Target, other: str, build_other: Callable[[], Target]) -> bool:
    """Whether `made` beats the other runtime; measured once for this kind of model on this machine, then remembered."""
    identity = [kind_of(model), str(model.dtype), name, other, platform.processor() or platform.machine(),
                platform.node(), torch.get_num_threads(), torch.__version__]  # fmt: skip
    path = user_cache_path("outrider") / "runtimes" / f"{digest(identity)}.json"
    try:
        seconds = json.loads(path.read_text())
        return bool(seconds[name] < seconds[other])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with told_if_slow(f"measuring whether {name} or {other} runs this model faster; done once and kept"):
        seconds = trial({name: made, other: build_other()})
    log.info("milliseconds of a step: %s", {name: round(1e3 * own, 1) for name, own in seconds.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(seconds))
    except (OSError, InputError) as error:
        log.info("the trial of runtimes could not be stored: %s", error)
    return seconds[name] < seconds[other]


def trial(targets: dict[str, Target]) -> dict[str, float]:
    """Mean of the median seconds of a plain and of a wide step; rounds alternate, so a slow spell falls on all."""
    room = min(target.max_context for target in targets.values())
    sizes = tuple(rows for rows in ROWS if rows + 2 <= room) or ROWS[:1]
    length = max(0, min(TEXT, room - sizes[-1] - 1))
    slots: dict[str, int] = {}
    seen: dict[tuple[str, int], list[float]] = {}
    try:
        for name, target in targets.items():
            slots[name] = target.acquire()
            for _ in target.prefill([slots[name]], [[i % target.vocab_size for i in range(length + 1)]], Needs()):
                pass
        for again, rows, (name, target) in product(range(ROUNDS + 1), sizes, targets.items()):
            tree = fixed(np.arange(rows) % target.vocab_size, np.arange(rows) - 1)
            begun = time.perf_counter()
            target.verify([slots[name]], [tree], Needs())
            if again:  # the first only warms up
                seen.setdefault((name, rows), []).append(time.perf_counter() - begun)
    finally:
        for name, slot in slots.items():
            targets[name].release(slot)
    return {name: sum(median(seen[name, rows]) for rows in sizes) / len(sizes) for name in targets}
