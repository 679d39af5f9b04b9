"""What a step of the mixture costs outside the models: propose and observe, by context length.

The rows of the target and the vocabulary-wide top-k are not timed. Text is random with repeats, so
that both parts have something to propose.
Run: python benchmarks/costs/mix_cost.py [--nodes 32] [--repeats 200] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.records import Budget, Chunk, Scores, StepRecord, Verdict
from outrider.draft.lookup.suffix import Suffix
from outrider.draft.mix import Mix
from outrider.draft.table import recycling
from outrider.draft.table.recycling import Recycling
from outrider.draft.table.top_rows import top_rows

VOCABULARY = 512  # small, so that the top-k of a row costs next to nothing


class Apart:
    """Time spent in the vocabulary-wide top-k, which is the target's business."""

    spent = 0.0

    @staticmethod
    def top_rows(*args: Any) -> Any:
        begun = time.perf_counter()
        rows = top_rows(*args)
        Apart.spent += time.perf_counter() - begun
        return rows


class Text:
    """A growing text, as a drafter sees it."""

    prompt: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    temperature = 0.0

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.all, self.length = tokens, 0

    @property
    def output(self) -> tuple[int, ...]:
        return ()

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self.all[: self.length]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measured(context, args.nodes, args.repeats) for context in (1024, 4096, 16384, 32000)]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['context']:6} tokens: {row['median_us']:.0f} us median, {row['p99_us']:.0f} us p99, "
                  f"{row['nodes']:.0f} nodes")  # fmt: skip


def measured(context: int, nodes: int, repeats: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    phrases = [random.integers(0, VOCABULARY, 12) for _ in range(400)]
    words = np.concatenate([phrases[i] for i in random.integers(0, 400, (context + 8 * repeats) // 12 + 50)])
    text = Text(words.astype(np.int64))
    text.length = context
    mix = Mix([Suffix(), Recycling(VOCABULARY)], seconds=lambda batch, most: 1.0 + 0.001 * np.arange(most + 1))
    logits = torch.randn(context - 1, VOCABULARY)
    mix.begin(0, text, [Chunk(0, 0, text.tokens[:-1].tolist(), Scores(logits))])  # type: ignore[arg-type]
    times, sizes = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        (tree,) = mix.propose([0], [Budget(nodes, 16)], [None])  # type: ignore[list-item]
        proposed = time.perf_counter()
        path, node = [], 0
        while (node := tree.child(node, int(text.all[text.length + len(path)]))) > 0:
            path.append(node)
        emitted = tuple(text.all[text.length : text.length + len(path) + 1].tolist())
        scores = Scores(torch.randn(len(tree), VOCABULARY))
        text.length += len(emitted)
        Apart.spent = 0.0
        resumed = time.perf_counter()
        mix.observe([0], [StepRecord(tree, Verdict(tuple(path), emitted[-1]), emitted, scores)])
        times.append(time.perf_counter() - resumed - Apart.spent + proposed - begun)
        sizes.append(tree.candidates)
    spent = np.array(times[repeats // 10 :]) * 1e6
    return {"context": context, "median_us": float(np.median(spent)), "p99_us": float(np.quantile(spent, 0.99)),
            "nodes": float(np.mean(sizes))}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    recycling.top_rows = Apart.top_rows
    main()
