"""Cost: measures what a verify step of this target takes on this machine, by rows, sequences and context.

Times the target through its protocol with trees of made-up tokens, and stores the curve as JSON in the user's cache,
one file for each model, runtime, device and number of threads. Measures only; deciding is for growers and controllers.
Cost: a few hundred steps once, seconds; later starts read the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from platformdirs import user_cache_path

from outrider.control.experts import ExpertCosts
from outrider.core.errors import InputError
from outrider.core.files import write_atomic
from outrider.core.protocols import Target
from outrider.core.records import GREEDY, Piece
from outrider.core.schedule import run_all
from outrider.core.tree import TokenTree, fixed

log = logging.getLogger("outrider")
FORMAT = 6  # raised when stored curves of an earlier form must be measured again
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ALIKE = (8, 16, 32, 64)  # rows at which a mixture model is also timed with candidates that share their experts


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a verify step; `seconds[b][c][r]` at batches[b], contexts[c] and rows[r] a sequence."""

    rows: tuple[int, ...]  # of one sequence
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    table: tuple[tuple[tuple[float, ...], ...], ...]
    experts: ExpertCosts | None = None  # of a mixture model

    def seconds(self, rows: int, batch: int = 1, context: int = 0) -> float:
        """A step of `rows` in all over `batch` sequences; linear between what was measured.

        Beyond the last size it goes on at the slope of the last stretch; beyond the last batch and context the nearest
        stands in. Never falls with more rows.
        """
        each = rows / max(batch, 1)
        (b0, b1, bt), (c0, c1, ct) = _between(self.batches, batch), _between(self.contexts, context)
        low, high = (self._along(b0, c0, each) * (1 - ct) + self._along(b0, c1, each) * ct,
                     self._along(b1, c0, each) * (1 - ct) + self._along(b1, c1, each) * ct)  # fmt: skip
        return low * (1 - bt) + high * bt

    @property
    def disturbed(self) -> bool:
        """Whether a step took less than half of a narrower one's time: something else ran beside that one."""
        times = np.array(self.table)
        return bool((times < 0.5 * np.maximum.accumulate(times, axis=-1)).any())

    def _along(self, batch: int, context: int, rows: float) -> float:
        times = np.minimum.accumulate(self.table[batch][context][::-1])[::-1]  # what disturbs a step makes it slower
        if rows <= self.rows[-1] or len(self.rows) < 2:
            return float(np.interp(rows, self.rows, times))
        slope = (times[-1] - times[-2]) / (self.rows[-1] - self.rows[-2])
        return float(times[-1] + slope * (rows - self.rows[-1]))


def measure(
    target: Target,
    rows: Sequence[int] = ROWS,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (128,),
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Time the target. Changes nothing that stays: the slots it takes are given back. What does not fit is left out."""
    fits = tuple(sorted({r for r in rows if 1 <= r <= target.max_rows and _depth(r) < target.max_context - 1}))
    batches = tuple(sorted({b for b in batches if 1 <= b <= target.free_slots}))
    room = target.max_context - 1 - _depth(max(fits, default=1))  # tokens before a tree that ends with the context
    contexts = tuple(sorted({min(c, room) for c in contexts}))
    if not (fits and batches and contexts and contexts[0] > 0):
        raise InputError("nothing to measure: the target has no free slot or no room; give it a larger cache")
    trees = [_tree(size, target.vocab_size) for size in fits]
    table = tuple(
        tuple(_times(target, trees, batch, context, repeats, clock)[0] for context in contexts) for batch in batches
    )
    return CostCurve(fits, batches, contexts, table, _experts(target, fits, contexts[0], repeats, clock))


def _experts(
    target: Target, rows: tuple[int, ...], context: int, repeats: int, clock: Callable[[], float]
) -> ExpertCosts | None:
    """What an expert costs: steps with as many rows that touch many experts, and few. None: there are no experts."""
    traits = target.traits
    if traits.active_experts is None:
        return None
    alike = [size for size in ALIKE if size in rows]
    trees = [*(_tree(size, target.vocab_size) for size in rows), *(_star(size) for size in alike)]
    seconds, touched = _times(target, trees, 1, context, repeats, clock)
    fewer = dict(zip(alike, zip(touched[len(rows) :], seconds[len(rows) :], strict=True), strict=True))
    return ExpertCosts.of(traits.experts, rows, touched[: len(rows)], fewer, seconds[: len(rows)])


def _times(
    target: Target, trees: Sequence[TokenTree], batch: int, context: int, repeats: int, clock: Callable[[], float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of a step with each of these trees: its seconds, and the experts that it touches."""
    slots: list[int] = []
    seen: list[list[float]] = [[] for _ in trees]
    touched = [0.0] * len(trees)
    count = target.traits.active_experts
    try:
        for _ in range(batch):
            slots.append(target.acquire())
        text = [i % target.vocab_size for i in range(context)]
        run_all(target, [(slot, text) for slot in slots])
        # Rounds over all sizes, so that a slow spell of the machine falls on each; the first only warms up. A size runs
        # twice and the second counts: some runtimes get ready anew whenever the size is another than before.
        for again, (place, tree) in product(range(repeats + 1), enumerate(trees)):
            pieces = [Piece(slot, tree=tree) for slot in slots]
            target.run(pieces, GREEDY)
            start = _now(target, clock)
            target.run(pieces, GREEDY)
            elapsed = _now(target, clock) - start
            touched[place] = count() if count is not None else 0.0
            if again:
                seen[place].append(elapsed)
    finally:
        for slot in slots:
            target.release(slot)
    return tuple(map(min, seen)), tuple(touched)  # other work on the machine only ever makes a step slower


def stored(
    target: Target, model: str, runtime: str, folder: Path | None = None, fresh: bool = False,
    rows: Sequence[int] = ROWS, batches: Sequence[int] = (1,), contexts: Sequence[int] = (128,), repeats: int = 5,
    measuring: AbstractContextManager[None] = nullcontext(), clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:  # fmt: skip
    """The curve kept for this model on this machine; measured and stored where there is none, or `fresh` asks for it.

    `model` is a fingerprint of the weights, `runtime` names what runs them and in which precision; `measuring` is
    around the measurement, where there is one.
    """
    identity = {
        "format": FORMAT, "model": model, "runtime": runtime, "device": _device(target.device),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "rows": list(rows), "batches": list(batches),
        "contexts": [min(context, target.max_context) for context in contexts],
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    path = (folder or user_cache_path("outrider") / "cost") / f"{key}.json"
    if not fresh and (curve := _read(path, identity)) is not None:
        return curve
    with measuring:
        curve = measure(target, rows, batches, contexts, repeats, clock)
    if curve.disturbed:
        log.warning("the machine was busy while steps were timed; they will be timed again at the next start")
        return curve
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"identity": identity, "curve": asdict(curve)}))
    except (OSError, InputError) as error:
        log.warning("the cost curve could not be stored, it will be measured again: %s", error)
    return curve


def _read(path: Path, identity: dict[str, object]) -> CostCurve | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        curve = kept["curve"]
        table = tuple(tuple(tuple(float(s) for s in times) for times in contexts) for contexts in curve["table"])
        shape = (tuple(curve["rows"]), tuple(curve["batches"]), tuple(curve["contexts"]))
        same = kept["identity"] == identity
        whole = np.shape(table) == (len(shape[1]), len(shape[2]), len(shape[0])) and np.size(table) > 0
        return CostCurve(*shape, table, _read_experts(curve["experts"])) if whole and same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_experts(kept: dict[str, Any] | None) -> ExpertCosts | None:
    if kept is None:
        return None
    rows, touched = tuple(kept["rows"]), tuple(float(count) for count in kept["touched"])
    if not rows or len(rows) != len(touched):
        raise ValueError("not whole")
    return ExpertCosts(float(kept["total"]), rows, touched, float(kept["seconds"]))


def _tree(rows: int, vocabulary: int) -> TokenTree:
    """Each node with two children: as deep and as wide as drafts are."""
    nodes = np.arange(rows)
    return fixed(nodes % vocabulary, np.where(nodes > 0, (nodes - 1) // 2, -1))


def _star(rows: int) -> TokenTree:
    """Candidates that are all the same token behind the same text: a router sends them to the same experts."""
    return fixed(np.zeros(rows, dtype=np.int64), np.where(np.arange(rows) > 0, 0, -1))


def _depth(rows: int) -> int:
    """Of a tree of so many rows that `_tree` makes."""
    return rows.bit_length() - 1


def _now(target: Target, clock: Callable[[], float]) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return clock()


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _between(points: Sequence[int], value: float) -> tuple[int, int, float]:
    """The neighbours of `value` among rising points, and how far it is from the first towards the second."""
    high = int(np.searchsorted(points, value))
    if high == 0 or high == len(points):
        return (min(high, len(points) - 1),) * 2 + (0.0,)  # type: ignore[return-value]
    low = high - 1
    return low, high, (value - points[low]) / (points[high] - points[low])
