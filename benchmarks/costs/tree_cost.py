"""What a step costs on the host besides the models: building and masking a 64-node tree, processing one row of logits.

Prints the median of many runs in microseconds, on one thread. Run: python benchmarks/costs/tree_cost.py [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from outrider.core.noise import key, race
from outrider.core.sampling import History, SamplingParams
from outrider.core.target_rows import TargetRows
from outrider.core.tree import chain, fixed, from_paths, merge, root

NODES = 64
ROWS: dict[str, dict[str, float]] = {
    "temperature 0": {},
    "temperature 0, repetition penalty": {"repetition_penalty": 1.1},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top-k 50": {"temperature": 0.7, "top_k": 50},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 0.7, min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "temperature 0.7, top-k 50, top-p 0.9, min-p 0.05": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "temperature 0.7, all penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
    },
}


def microseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def tree_costs(repeats: int) -> dict[str, float]:
    tokens = np.arange(NODES + 1)
    parents = np.maximum((tokens - 1) // 2, 0)
    parents[0] = -1
    path = list(range(NODES))
    paths = [[i, i + 1, i + 2, i + 3] for i in range(NODES // 4)]
    narrow, wide = chain(0, path), fixed(tokens, parents)
    return {
        "build a chain": microseconds(lambda: chain(0, path), repeats),
        "build a binary tree": microseconds(lambda: fixed(tokens, parents), repeats),
        "build from paths": microseconds(lambda: from_paths(0, paths), repeats),
        "merge two halves": microseconds(lambda: merge(chain(0, path[:32]), from_paths(0, paths[:8])), repeats),
        "mask a chain": microseconds(narrow.ancestor_mask, repeats),
        "mask a binary tree": microseconds(wide.ancestor_mask, repeats),
        "mute a leaf": microseconds(lambda: wide.mute([NODES]), repeats),
    }


def row_costs(vocabulary: int, context: int, repeats: int) -> dict[str, dict[str, float]]:
    generator = np.random.default_rng(0)
    row = torch.from_numpy(generator.normal(size=vocabulary).astype(np.float32) * 3)  # peaked as a model's rows are
    prompt = generator.integers(0, vocabulary, context).tolist()
    path = prompt[:4]
    costs = {}
    for name, options in ROWS.items():
        history = History(prompt, SamplingParams(**options), vocabulary)  # type: ignore[arg-type]
        history.append(prompt[: context // 10])

        def processed(history: History = history) -> object:
            rows = TargetRows(row[None], root(0), history)
            return rows.argmax(0) if rows.greedy else rows.probs(0)

        costs[name] = {
            "process": microseconds(partial(history.process, row, path), repeats),
            "distribution": microseconds(processed, repeats),
            "draft_rows": microseconds(partial(history.draft_rows, row[None], [path], 256), repeats),
        }
    probs = torch.softmax(row, 0)
    costs["the target's noise picks a token"] = {"pick": microseconds(lambda: race(probs, key(1, 2, 3)), repeats)}
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--context", type=int, default=2000, help="prompt tokens, for the penalties")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trees, rows = tree_costs(options.repeats), row_costs(options.vocabulary, options.context, options.repeats)
    settings = {"unit": "microseconds", "nodes": NODES, "vocabulary": options.vocabulary, "context": options.context}
    result = {"settings": settings, "tree": trees, "row": rows}
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"tree of {NODES} nodes")
    for name, cost in trees.items():
        print(f"  {name:<52}{cost:>9.1f} us")
    print(f"one row of {options.vocabulary} logits, after a path of 4")
    for name, parts in rows.items():
        print(f"  {name:<52}" + "   ".join(f"{part} {cost:.1f} us" for part, cost in parts.items()))


if __name__ == "__main__":
    main()
