"""What growing a tree costs outside the source: microseconds for each grower, from rows of a source that costs nothing.

The source hands out ready rows (256 tokens by default, peaked as a draft model's are), so what is timed is drawing,
bookkeeping and building the tree. The goal is 500 microseconds for 32 nodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.protocols import Context, Grower
from outrider.core.records import Budget, Chunk, Needs, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.grow.chain import Chain
from outrider.grow.cost_aware import CostAware
from outrider.grow.dyspec import Heap, Threshold
from outrider.grow.kary import KAry
from outrider.grow.rsd import ConstantBranching, StochasticBeam
from outrider.grow.sequoia import Sequoia
from outrider.grow.top_plus_one import TopPlusOne
from outrider.grow.topk import TopK

EXPANSION = (4, 2, 1, 1, 1)  # 4 + 8 + 8 + 8 + 4 of 8: 32 nodes
GROWERS: dict[str, Grower] = {
    "chain": Chain(),
    "k-ary, iid": KAry(EXPANSION, "iid"),
    "k-ary, without replacement": KAry(EXPANSION, "without-replacement"),
    "k-ary, top": KAry(EXPANSION, "top"),
    "top plus one": TopPlusOne(EXPANSION),
    "top-k re-ranked": TopK(),
    "RSD-C": ConstantBranching(EXPANSION),
    "RSD-S": StochasticBeam(width=4, depth=8),
    "DySpec, heap": Heap(),
    "DySpec, threshold": Threshold(),
    "Sequoia": Sequoia(),
    "cost-aware": CostAware(lambda rows, batch, context: 1.0, lambda rows: 0.0),
}


class Ready:
    """A source with its rows at hand; a node's row depends on its token only."""

    name = "ready"
    needs = Needs()

    def __init__(self, width: int, rows: int = 97) -> None:
        generator = np.random.default_rng(0)
        self.rows = []
        for _ in range(rows):
            weights = np.sort(np.exp(generator.normal(size=width) * 3.0))[::-1]
            self.rows.append(QRow(generator.permutation(49152)[:width], weights / weights.sum()))
        self.spent = 0.0

    def begin(self, slot: int, context: Context) -> None: ...
    def absorb(self, chunks: Sequence[Chunk]) -> None: ...
    def end(self, slot: int) -> None: ...
    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None: ...

    def start(self, slots: Sequence[int]) -> list[QRow]:
        begun = time.perf_counter()
        rows = [self.rows[slot % len(self.rows)] for slot in slots]
        self.spent += time.perf_counter() - begun
        return rows

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        begun = time.perf_counter()
        each = zip(trees, done, strict=True)
        rows = [[self.rows[t % len(self.rows)] for t in tree.tokens[first:].tolist()] for tree, first in each]
        self.spent += time.perf_counter() - begun
        return rows


def measure(grower: Grower, source: Ready, nodes: int, drawn: bool, repeats: int) -> dict[str, float]:
    times, sizes = [], []
    for step in range(repeats + 20):
        noise = StreamNoise(1, 0, DRAFT, step, 0) if drawn else None
        source.spent, begun = 0.0, time.perf_counter()
        (tree,) = grower.grow(source, [step], [0], [Budget(nodes, nodes)], [noise])
        times.append(time.perf_counter() - begun - source.spent)
        sizes.append(tree.candidates)
    return {
        "microseconds": round(statistics.median(times[20:]) * 1e6, 1),  # the first ones settle thresholds and shapes
        "fastest": round(min(times[20:]) * 1e6, 1),
        "nodes": round(statistics.mean(sizes[20:]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--width", type=int, default=256, help="tokens a source row keeps")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    source = Ready(options.width)
    result = {
        "settings": {"nodes": options.nodes, "width": options.width},
        "growers": {
            name: {
                "drawn": measure(grower, source, options.nodes, True, options.repeats),
                "greedy": measure(grower, source, options.nodes, False, options.repeats),
            }
            for name, grower in GROWERS.items()
        },
    }
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    title = f"microseconds outside the source, {options.nodes} nodes"
    print(f"{title:<48}{'drawn':>10}{'fastest':>10}{'greedy':>10}{'nodes':>8}")
    for name, row in result["growers"].items():
        print(
            f"{name:<48}{row['drawn']['microseconds']:>10}{row['drawn']['fastest']:>10}{row['greedy']['microseconds']:>10}{row['drawn']['nodes']:>8}"
        )


if __name__ == "__main__":
    main()
