"""What lookahead and Jacobi drafting cost on the host: microseconds of propose and observe, by the length of the text.

About 32 candidates a step. Rows of 64 tokens stand for the vocabulary, so that passes over it (an argmax a row, or a
sparse distribution a row under sampling) cost little and what is timed is the drafter. The goal is 200 microseconds.
Run: python benchmarks/costs/fixed_point.py [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.protocols import Drafter
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.draft.table.jacobi import Jacobi
from outrider.draft.table.lookahead import Lookahead

VOCAB = 64
CONTEXTS = (1024, 8192, 32768)
DRAFTERS: dict[str, tuple[Callable[[int], Drafter], float]] = {
    "jacobi, copied guesses": (lambda nodes: Jacobi(nodes, "copy"), 0.0),
    "jacobi, random guesses": (lambda nodes: Jacobi(nodes, "random"), 0.0),
    "jacobi, sampled from 64 tokens": (lambda nodes: Jacobi(nodes, "copy", sampled=True), 1.0),
    "jacobi, sampled from 8 tokens": (lambda nodes: Jacobi(nodes, "copy", sampled=True, width=8), 1.0),
    "lookahead, N = 5": (lambda nodes: Lookahead(nodes // 8, 5, nodes // 8), 0.0),
    "lookahead, N = 3": (lambda nodes: Lookahead(nodes // 4, 3, nodes // 4), 0.0),
}


def measure(drafter: Drafter, nodes: int, context: int, temperature: float, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    history = History(rng.integers(0, VOCAB, context).tolist(), SamplingParams(temperature=temperature), VOCAB)
    logits = torch.from_numpy(rng.normal(size=(nodes + 1, VOCAB)).astype(np.float32) * 3)
    begun = time.perf_counter()
    drafter.begin(0, history)
    began, propose, observe, sizes = time.perf_counter() - begun, [], [], []
    for step in range(repeats + 10):
        noise = StreamNoise(1, 0, DRAFT, step, len(history.tokens))
        start = time.perf_counter()
        (tree,) = drafter.propose([0], [Budget(nodes, nodes)], [noise])
        made = time.perf_counter()
        path = tuple(tree.path(1 + step % 3))[: step % 3]
        emitted = (*(int(tree.tokens[node]) for node in path), int(rng.integers(0, VOCAB)))
        history.append(emitted)
        record = StepRecord(tree, Verdict(path, emitted[-1]), emitted, Scores(logits[: len(tree)]))
        again = time.perf_counter()
        drafter.observe([0], [record])
        propose.append(made - start)
        observe.append(time.perf_counter() - again)
        sizes.append(tree.candidates)
    drafter.end(0)
    both = [a + b for a, b in zip(propose[10:], observe[10:], strict=True)]
    middle = {"propose": propose[10:], "observe": observe[10:], "both": both}
    return {name: round(statistics.median(times) * 1e6, 1) for name, times in middle.items()} | {
        "begin": round(began * 1e6, 1),
        "nodes": round(statistics.mean(sizes), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    table: dict[str, dict[int, dict[str, float]]] = {}
    for name, (make, temperature) in DRAFTERS.items():
        measure(make(options.nodes), options.nodes, 64, temperature, 5)  # compiles what is compiled
        table[name] = {
            context: measure(make(options.nodes), options.nodes, context, temperature, options.repeats)
            for context in CONTEXTS
        }
    if options.json == "-":
        print(json.dumps({"nodes": options.nodes, "drafters": table}, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps({"nodes": options.nodes, "drafters": table}, indent=2) + "\n")
    print(f"{'microseconds a step':<34}{'tokens':>8}{'nodes':>7}{'propose':>9}{'observe':>9}{'both':>8}{'begin':>10}")
    for name, rows in table.items():
        for context, row in rows.items():
            figures = f"{row['nodes']:>7}{row['propose']:>9}{row['observe']:>9}{row['both']:>8}{row['begin']:>10}"
            print(f"{name:<34}{context:>8}{figures}")


if __name__ == "__main__":
    main()
