"""Accepted length of every acceptance rule and every tree shape at equal numbers of candidates, with one draft model.

Nothing is timed, so prompts run as one batch and configurations in `--workers` processes on one device. `--rounds` is
the number of samples of each prompt. Intervals are bootstrap over prompts, a prompt with all its samples; differences
are paired by prompt. Run: python benchmarks/methods/rules.py --prompts FILE.jsonl --limit 10 --rounds 3 [--device cuda]
[--workers 8] [--budgets 4,8,16,32] [--only dyspec] [--json [FILE]]
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import torch

import outrider
from benchmarks.common import arguments, give, run
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.bench.machine import machine, usable_cores
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, Recipe
from outrider.core.records import StepRecord
from outrider.core.tree import NOTHING
from outrider.grow.dyspec import Calibration, Heap, Threshold
from outrider.store.prompts import built_in_prompts, read_prompts

SHAPES = {4: "2,1", 8: "2,1,1,1", 16: "4,1,1,1", 32: "8,1,1,1"}
BUSHY = {4: "2,1", 8: "2,2", 16: "2,2,2", 32: "2,2,2,2"}
BEAMS = {4: 2, 8: 2, 16: 4, 32: 8}
DEPTH = 6  # of the trees that choose their own shape
PAIRS = (  # what the papers claim: the first keeps more than the second
    ("recursive, without replacement (rsd-c)", "recursive, iid (specinfer)"),
    ("bushy, recursive, without replacement", "bushy, recursive, iid"),
    ("rsd-s", "recursive, iid (specinfer)"),
    ("rsd-s", "recursive, without replacement (rsd-c)"),
    ("block, chain (block-verify)", "rejection, chain (draft-model)"),
    ("k-SEQ, iid (spectr)", "recursive, iid (specinfer)"),
    ("bushy, k-SEQ, iid", "bushy, recursive, iid"),
    ("traversal, without replacement", "recursive, without replacement (rsd-c)"),
    ("traversal, iid", "recursive, iid (specinfer)"),
    ("optimal, top plus one (mdsd-optimal)", "recursive, without replacement (rsd-c)"),
    ("sequoia", "recursive, without replacement (rsd-c)"),
    ("dyspec, heap, the paper's", "recursive, without replacement (rsd-c)"),
    ("dyspec, heap, the paper's", "sequoia"),
    ("dyspec, heap, learnt chances", "dyspec, heap, the paper's"),
    ("dyspec, heap", "dyspec, heap, learnt chances"),
    ("dyspec, heap", "recursive, without replacement (rsd-c)"),
    ("dyspec, heap", "sequoia"),
    ("dyspec, threshold", "dyspec, threshold, the paper's"),
    ("dyspec, threshold", "recursive, without replacement (rsd-c)"),
    ("dyspec, threshold", "sequoia"),
    ("invariant, chain with shared noise", "rejection, chain (draft-model)"),
)
Method = tuple[str, dict[str, Any]]


class ByValueAlone(Calibration):
    """Learnt chances, but positions ranked by v as the paper does, and chances whatever the rank."""

    def gain(self, rank: int, largest: float | None = None) -> float:
        return 1.0

    def chance(self, share: float, rank: int = 0) -> float:
        return super().chance(share, 0)

    def observe(self, record: StepRecord) -> None:
        super().observe(record)
        self._drawn[:, 0] += self._drawn[:, 1:].sum(1)  # all ranks in one class
        self._drawn[:, 1:] = 0.0


def contenders(budget: int) -> dict[str, Method]:
    shape, bushy = {"expansion": SHAPES[budget], "depth": 4}, {"expansion": BUSHY[budget], "depth": 4}
    heap = {"depth": DEPTH, "form": "heap"}
    return {
        "rejection, chain (draft-model)": ("draft-model", {}),
        "block, chain (block-verify)": ("block-verify", {}),
        "invariant, chain with shared noise": ("draft-model", {"verifier": "invariant"}),
        "invariant, top-k tree": ("specinfer", {**shape, "verifier": "invariant"}),
        "naive, iid": ("specinfer", {**shape, "verifier": "naive"}),
        "recursive, iid (specinfer)": ("specinfer", shape),
        "k-SEQ, iid (spectr)": ("spectr", shape),
        "traversal, iid": ("specinfer", {**shape, "verifier": "traversal"}),
        "recursive, without replacement (rsd-c)": ("rsd-c", shape),
        "traversal, without replacement": ("traversal", shape),
        "optimal, top plus one (mdsd-optimal)": ("mdsd-optimal", shape),
        "bushy, recursive, iid": ("specinfer", bushy),
        "bushy, k-SEQ, iid": ("spectr", bushy),
        "bushy, recursive, without replacement": ("rsd-c", bushy),
        "rsd-s": ("rsd-s", {"beam": BEAMS[budget], "depth": 4}),
        "sequoia": ("sequoia", {"depth": DEPTH}),
        "dyspec, threshold": ("dyspec", {"depth": DEPTH}),
        "dyspec, threshold, learnt chances": ("dyspec", {"depth": DEPTH}),
        "dyspec, threshold, the paper's": ("dyspec", {"depth": DEPTH}),
        "dyspec, heap": ("dyspec", heap),
        "dyspec, heap, learnt chances": ("dyspec", heap),
        "dyspec, heap, the paper's": ("dyspec", heap),
    }


class Watch:
    """A drafter that is watched: how deep and wide its trees are, and how often tested draws of each R are accepted."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.trees, self.depths, self.roots = 0, 0, 0
        self.tested, self.won = np.zeros((4, 16)), np.zeros((4, 16))  # by rank and power of two of R

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.drafter.observe(slots, records)
        for record in records:
            self._count(record)

    def _count(self, record: StepRecord) -> None:
        tree, path = record.tree, record.verdict.path
        if not tree.candidates:
            return
        self.trees, self.depths = self.trees + 1, self.depths + tree.depth
        self.roots += len(tree.children(0))
        for node, accepted in zip((0, *path), (*path, NOTHING), strict=True):
            for rank, draw in enumerate(tree.draws[node]):
                if draw.row is not None:
                    share = draw.row.prob(draw.token)
                    at = min(rank, 3), min(int(-log2(share)), 15) if share > 0 else 15
                    self.tested[at] += 1
                    self.won[at] += draw.child == accepted
                if draw.child == accepted:
                    break

    def seen(self) -> dict[str, Any]:
        trees = max(self.trees, 1)
        tables = {"tested": self.tested.astype(int).tolist(), "won": self.won.astype(int).tolist()}
        return {"depth": self.depths / trees, "children of the root": self.roots / trees, **tables}


def recipe_for(engine: Outrider, label: str, budget: int) -> tuple[Recipe, Watch]:
    method, options = contenders(budget)[label]
    recipe = engine.recipe(method, {"budget": budget, "controller": "fixed", **options})
    assert recipe.drafter is not None
    if method == "dyspec":
        form = Heap if "heap" in label else Threshold
        calibration = None if "paper" in label else ByValueAlone() if "chances" in label else Calibration()
        recipe.drafter.grower = form(DEPTH, calibration=calibration)  # type: ignore[attr-defined]
    watch = Watch(recipe.drafter)
    return dataclasses.replace(recipe, drafter=watch), watch


_engine: Outrider | None = None  # of this process
_prompts: list[list[int]] = []


def load(settings: dict[str, Any]) -> None:
    """A worker's model, and a cache with room for 48 sequences of the longest prompt; the rest wait."""
    global _engine
    torch.set_num_threads(max(1, usable_cores() // settings["workers"]))
    context = settings["longest"] + settings["max_new_tokens"] + 64
    _engine = outrider.load(
        settings["model"], method="plain", device=settings["device"], dtype=settings["dtype"], strict=True,
        max_slots=settings["slots"], max_context=context, cache_bytes=settings["cache_bytes"],
    )  # fmt: skip
    _prompts[:] = settings["ids"]


def measure(label: str, budget: int, params: SamplingParams) -> dict[str, Any]:
    """One configuration over all prompts and samples."""
    assert _engine is not None
    recipe, watch = recipe_for(_engine, label, budget)
    handles = [_engine.engine.submit(ids, params, recipe) for ids in _prompts]
    counts, pooled = [], None
    for handle in handles:
        runs = [g.stats for g in handle.results()]
        counts.append([sum(s.new_tokens for s in runs), sum(s.steps for s in runs), sum(s.drafted for s in runs)])
        for stats in runs:
            if pooled is None:
                pooled = stats
            else:
                pooled.add(stats)
    assert pooled is not None
    shape = {"offered by depth": pooled.offered_at, "accepted by depth": pooled.accepted_at, **watch.seen()}
    return {"rule": label, "budget": budget, "counts": counts, **accepted(np.array(counts, dtype=float)), **shape}


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=64)
    parser.add_argument("--budgets", default="8,16", help="candidates a step, of 4, 8, 16, 32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1, help="processes; each holds a model and a cache")
    parser.add_argument("--slots", type=int, default=48, help="sequences that run at once in a worker")
    parser.add_argument("--cache-bytes", type=int, default=6 << 30, help="of each worker")
    parser.add_argument("--only", default="", help="configurations whose name holds one of these words, by commas")
    args = parser.parse_args()
    chosen = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    words = [word.strip() for word in args.only.split(",")]
    jobs = [
        (label, budget)
        for budget in sorted(map(int, args.budgets.split(",")), reverse=True)  # the longest first
        for label in contenders(budget)
        if any(word in label for word in words)
    ]
    settings = {**vars(args), **encoded(args, [p.conversation([]) for p in chosen])}
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1, n=args.rounds
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    shown = ("max_new_tokens", "temperature", "rounds", "budgets", "slots")
    payload = {
        "rows": rows,
        "settings": {"prompts": len(chosen), **{name: getattr(args, name) for name in shown}},
        "machine": machine(),
    }
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, spawn, load, (settings,)) as pool:
        for done in as_completed([pool.submit(measure, label, budget, params) for label, budget in jobs]):
            rows.append(done.result())
            print(line(rows[-1]), file=sys.stderr, flush=True)
            if args.json not in (None, "-"):
                Path(args.json).write_text(json.dumps(payload), encoding="utf-8")  # what there is, if it is cut short
    rows.sort(key=lambda row: (row["budget"], list(contenders(row["budget"])).index(row["rule"])))
    payload["pairs"] = pairs(rows)
    give(args, payload, [*map(line, rows), "", *map(pair_line, payload["pairs"])])


def encoded(args: Any, conversations: Sequence[Any]) -> dict[str, Any]:
    """Token ids, made once: a worker need not know how."""
    with outrider.load(args.model, method="plain", device="cpu", max_slots=1, max_context=64) as engine:
        ids = [list(map(int, engine.encode_chat(conversation))) for conversation in conversations]
    return {"ids": ids, "longest": max(map(len, ids))}


def accepted(counts: np.ndarray) -> dict[str, Any]:
    """Tokens a step over all prompts, and the middle 95% of 1000 resamplings of prompts."""
    lengths = _resampled(counts)
    tokens, steps, drafted = counts.sum(0)
    return {"accepted": tokens / steps, "interval": _middle(lengths), "candidates": drafted / steps}


def pairs(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claimed orderings: the difference in accepted length, the same prompts resampled for both."""
    found = {(row["rule"], row["budget"]): np.array(row["counts"], dtype=float) for row in rows}
    out = []
    for more, less in PAIRS:
        for budget in sorted({budget for _, budget in found}):
            if (more, budget) in found and (less, budget) in found:
                a, b = found[more, budget], found[less, budget]
                gap = a[:, 0].sum() / a[:, 1].sum() - b[:, 0].sum() / b[:, 1].sum()
                spread = _middle(_resampled(a) - _resampled(b))
                out.append({"more": more, "less": less, "budget": budget, "difference": gap, "interval": spread})
    return out


def _resampled(counts: np.ndarray) -> np.ndarray:
    again = np.random.default_rng(0).integers(0, len(counts), (1000, len(counts)))
    sums = counts[again].sum(1)
    return sums[:, 0] / sums[:, 1]


def _middle(values: np.ndarray) -> list[float]:
    return np.quantile(values, (0.025, 0.975)).tolist()


def line(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    shape = (
        f"{row['candidates']:.1f} candidates, {row['depth']:.1f} deep, {row['children of the root']:.1f} at the root"
    )
    return f"{row['rule']:<42}{row['budget']:>4}  {row['accepted']:.3f}  [{low:.3f}, {high:.3f}]  {shape}"


def pair_line(pair: dict[str, Any]) -> str:
    low, high = pair["interval"]
    title = f"{pair['more']} over {pair['less']}"
    return f"{title:<84}{pair['budget']:>4}  {pair['difference']:+.3f}  [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    run(main)
