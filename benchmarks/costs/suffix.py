"""What drafting by suffix matches costs: begin, propose and observe at growing context lengths, batch of one.

The text is a mixture of fresh tokens and copied passages, so that matches of all lengths occur; finished requests fill
the shared memory too. Prints median and 99th percentile in microseconds. The tree is built, no model runs.
Run: python benchmarks/costs/suffix.py [--nodes 32] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import TokenTree
from outrider.draft.lookup.suffix import Suffix

VOCABULARY = 49152


def text(length: int, seed: int) -> NDArray[np.int64]:
    """Zipf-like tokens; half of the text is passages copied from before."""
    generator = np.random.default_rng(seed)
    tokens = np.minimum(generator.zipf(1.3, length), VOCABULARY - 1)
    at = 64
    while at < length:
        size = int(generator.integers(4, 64))
        if generator.random() < 0.5:
            start = int(generator.integers(0, at))
            copied = tokens[start : min(start + size, at)].copy()
            copied = copied[: length - at]
            tokens[at : at + len(copied)] = copied
        at += size
    return tokens.astype(np.int64)


def accepted(tree: TokenTree, coming: list[int]) -> tuple[int, ...]:
    path: list[int] = []
    while len(path) < len(coming) - 1 and (child := tree.child(path[-1] if path else 0, coming[len(path)])) > 0:
        path.append(child)
    return tuple(path)


def measure(drafter: Suffix, context: int, steps: int, nodes: int, seed: int) -> dict[str, Any]:
    clock, whole = time.perf_counter, text(context + steps * (nodes + 1), seed).tolist()
    history = History(whole[:context], SamplingParams(), VOCABULARY)
    begun = clock()
    drafter.begin(0, history)
    times: dict[str, list[float]] = {"begin": [clock() - begun], "propose": [], "observe": [], "both": []}
    position = context
    for _ in range(steps):
        started = clock()
        (tree,) = drafter.propose([0], [Budget(nodes, nodes)], [])
        proposed = clock()
        coming = whole[position : position + nodes + 1]
        path = accepted(tree, coming)
        emitted = tuple(coming[: len(path) + 1])
        history.append(emitted)
        record = StepRecord(tree, Verdict(path, emitted[-1]), emitted, Scores(None))
        resumed = clock()
        drafter.observe([0], [record])
        ended = clock()
        times["propose"].append(proposed - started)
        times["observe"].append(ended - resumed)
        times["both"].append(proposed - started + ended - resumed)
        position += len(emitted)
    drafter.end(0)
    return {
        "context": context,
        "accepted_length": round((position - context) / steps, 2),
        **{name: _summary(values) for name, values in times.items()},
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds) * 1e6
    return {"median": round(float(np.median(values)), 1), "p99": round(float(np.quantile(values, 0.99)), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--finished", type=int, default=400_000, help="tokens of finished requests in memory")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    drafter = Suffix()
    measure(drafter, 256, 20, options.nodes, 0)  # compiles
    for seed in range(options.finished // 2000):
        history = History([1], SamplingParams(), VOCABULARY)
        drafter.begin(0, history)
        history.append(text(2000, seed))
        drafter.end(0)
    rows = [measure(drafter, context, options.steps, options.nodes, 1000 + context) for context in options.contexts]
    settings = {"unit": "microseconds", "nodes": options.nodes, "finished_tokens": options.finished}
    result = {"settings": settings, "rows": rows}
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{options.nodes} nodes, microseconds: median (99th percentile); begin once")
    for row in rows:
        parts = "   ".join(f"{n} {row[n]['median']:.0f} ({row[n]['p99']:.0f})" for n in ("propose", "observe", "both"))
        print(f"  context {row['context']:>6}   begin {row['begin']['median'] / 1000:.1f} ms   {parts}")


if __name__ == "__main__":
    main()
