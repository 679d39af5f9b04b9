"""The retrieval store on a folder of your own: how long a build takes, what it weighs, how fast it answers.

Contexts are taken from the corpus itself, half of them with a token changed so that the match must back off. `longest`
is a search from a 64-token context, `advance` the same after one more token from the answer before it; `draft` is a
whole proposal and its observation for 32 nodes, the tree included. Run it with an idle machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import run
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.draft.lookup.retrieval import Retrieval
from outrider.models import load_tokenizer
from outrider.store.build import build
from outrider.store.format import separator
from outrider.store.store import Store, describe, open_store
from outrider.store.tokens import fingerprint

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder of text")
    parser.add_argument("--tokenizer", default="smollm2")
    parser.add_argument("--store", type=Path, help="where to build it; an existing one is only searched")
    parser.add_argument("--shard-bytes", type=int, default=1 << 29)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(args, args.store or Path(scratch) / "store")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(args.tokenizer)
    before, start, cpu = _peak(), time.perf_counter(), time.process_time()
    made = build(args.corpus, tokenizer, args.tokenizer, folder, shard_bytes=args.shard_bytes)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    store = open_store(folder, fingerprint(tokenizer))
    about = describe(store)
    figures: dict[str, Any] = {
        "text_bytes": sum(corpus["bytes"] for corpus in about["corpora"]),
        "tokens": about["tokens"], "documents": about["documents"], "shards": len(about["shards"]),
        "store_bytes": about["bytes"],
    }  # fmt: skip
    if made.shards:
        figures["build"] = {
            "seconds": seconds, "processor_seconds": cpu, "tokens_per_s": made.tokens / seconds,
            "peak_bytes": _peak(), "peak_bytes_before": before,
        }  # fmt: skip
    store.warm()
    contexts = _contexts(store, args.queries)
    figures["longest_us"] = _spread(contexts, lambda c: store.longest(c[:-1]))
    reaches = [store.longest(context[:-1]) for context in contexts]
    figures["matched_tokens"] = float(np.mean([reach.match.length for reach in reaches]))
    pairs = list(zip(contexts, reaches, strict=True))
    figures["advance_us"] = _spread(pairs, lambda pair: store.advance(pair[1], pair[0][1:], 1))
    figures["next_tokens_us"] = _spread(reaches[:2000], lambda reach: store.next_tokens(reach.match))
    figures |= _drafting(store, contexts[:4000])
    return figures


def _contexts(store: Store, count: int) -> list[np.ndarray]:
    """Stretches of 65 tokens; one token of every second is another, somewhere in its later half."""
    rng = np.random.default_rng(0)
    found = []
    while len(found) < count:
        shard = store.shards[rng.integers(len(store.shards))]
        place = int(rng.integers(max(len(shard.tokens) - LENGTH, 1)))
        context = shard.tokens[place : place + LENGTH + 1].astype(np.int64)
        if len(context) <= LENGTH or (context == separator(shard.tokens.itemsize)).any():
            continue
        if len(found) % 2:
            context[rng.integers(LENGTH // 2, LENGTH)] = rng.integers(store.vocabulary)
        found.append(context)
    return found


def _drafting(store: Store, contexts: list[np.ndarray]) -> dict[str, Any]:
    """A step each: propose 32 nodes, then learn what came; every context is a sequence that grows by one token."""
    drafter = Retrieval(store)
    steps, nodes = [], []
    for context in contexts:
        view = SimpleNamespace(tokens=context[:-1])
        drafter.begin(0, view)  # type: ignore[arg-type]
        drafter.propose([0], [Budget(32, 16)], [])  # type: ignore[list-item]
        view.tokens = context
        start = time.perf_counter()
        tree = drafter.propose([0], [Budget(32, 16)], [])[0]
        emitted = (*tree.path_tokens(tree.candidates), 0)
        drafter.observe([0], [StepRecord(tree, Verdict((), 0), emitted, Scores(None))])
        steps.append(time.perf_counter() - start)
        nodes.append(tree.candidates)
    return {"draft_us": _quantiles(steps), "draft_nodes": float(np.mean(nodes))}


def _spread(items: list[Any], call: Callable[[Any], Any]) -> dict[str, float]:
    times = []
    for item in [*items[:50], *items]:
        start = time.perf_counter()
        call(item)
        times.append(time.perf_counter() - start)
    return _quantiles(times[50:])


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(1e6 * float(np.percentile(seconds, q)), 1) for q in (50, 90, 99)}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    run(main)
