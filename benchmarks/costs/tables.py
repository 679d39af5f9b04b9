"""What the table drafters cost: microseconds of propose and of observe at batch 1, by length of the context.

The text repeats itself as real text does and the tables are full from it, so proposals fill their budget; a candidate
or two are accepted in each step. The search for the likeliest tokens of each score row is taken out and shown alone.
The goal is 200 microseconds for propose and observe together at 32 nodes, whatever the length.
Run: python benchmarks/costs/tables.py [--nodes 32] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.protocols import Drafter
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import TokenTree, root
from outrider.draft.table import recycling, stand
from outrider.draft.table.aded import Aded
from outrider.draft.table.recycling import Recycling
from outrider.draft.table.stand import Stand
from outrider.draft.table.top_rows import TopRows, top_rows

VOCAB = 49152
DRAFTERS: dict[str, tuple[Callable[[], Drafter], float]] = {  # and the temperature of the request
    "token-recycling, adaptive": (lambda: Recycling(VOCAB, learn_prompt=False), 0.0),
    "token-recycling, static": (lambda: Recycling(VOCAB, shape="static", learn_prompt=False), 0.0),
    "stand, greedy": (lambda: Stand(VOCAB, learn_prompt=False), 0.0),
    "stand, sampled": (lambda: Stand(VOCAB, learn_prompt=False), 0.7),
    "aded": (lambda: Aded(VOCAB), 0.0),
}


class ReadyRows:
    """Stands in for the vocabulary-wide search: a node's likeliest successors follow from its token alone."""

    def __init__(self, source: np.random.Generator) -> None:
        common = source.permutation(VOCAB)[:64].astype(np.int32)  # the words of the text
        weights = np.sort(np.exp(source.normal(size=(VOCAB, 16)) * 2.5), axis=1)[:, ::-1]
        self.logprobs = np.log(weights / weights.sum(1, keepdims=True) * 0.98).astype(np.float32)
        self.ids = source.integers(0, VOCAB, (VOCAB, 16), dtype=np.int32)
        self.ids[:, :4] = common[source.integers(0, 64, (VOCAB, 4))]

    def __call__(self, tokens: torch.Tensor, count: int) -> TopRows:
        return TopRows(self.ids[tokens.numpy(), :count], self.logprobs[tokens.numpy(), :count])


def text(rows: ReadyRows, length: int, source: np.random.Generator) -> list[int]:
    """Each token one of its predecessor's four likeliest successors, mostly the first: contexts come again."""
    tokens = [0]
    for rank in source.choice(4, length - 1, p=(0.6, 0.2, 0.1, 0.1)).tolist():
        tokens.append(int(rows.ids[tokens[-1], rank]))
    return tokens


def teach(drafter: Drafter, history: History, rows: ReadyRows) -> None:
    """As if the text had been generated token by token."""
    tokens = history.tokens
    past = History(tokens[:2].tolist(), history.params, VOCAB)
    drafter.begin(1, past)
    for token in tokens[2:].tolist():
        tree = root(int(past.tokens[-1]))
        past.append([token])
        drafter.observe([1], [StepRecord(tree, Verdict((), token), (token,), Scores(torch.from_numpy(tree.tokens)))])
    drafter.end(1)


def verified(tree: TokenTree, rows: ReadyRows, source: np.random.Generator) -> StepRecord:
    """Some path among the first nodes is accepted."""
    path = tuple(tree.path(int(source.integers(min(len(tree), 6)))))
    last = int(rows.ids[tree.tokens[path[-1] if path else 0], source.integers(4)])
    emitted = (*(int(tree.tokens[node]) for node in path), last)
    return StepRecord(tree, Verdict(path, last), emitted, Scores(torch.from_numpy(tree.tokens)))


def measure(make: Callable[[], Drafter], temperature: float, length: int, nodes: int, repeats: int) -> dict[str, Any]:
    source = np.random.default_rng(0)
    rows = ReadyRows(source)
    history = History(text(rows, length, source), SamplingParams(temperature=temperature), VOCAB)
    drafter = make()
    proposing, observing, sizes = [], [], []
    with patch.object(recycling, "top_rows", rows), patch.object(stand, "top_rows", rows):
        drafter.begin(0, history)
        teach(drafter, history, rows)
        for step in range(repeats + 20):
            noise = StreamNoise(1, 0, DRAFT, step, 0)
            begun = time.perf_counter()
            (tree,) = drafter.propose([0], [Budget(nodes, nodes)], [noise])
            proposing.append(time.perf_counter() - begun)
            history.append((record := verified(tree, rows, source)).emitted)
            begun = time.perf_counter()
            drafter.observe([0], [record])
            observing.append(time.perf_counter() - begun)
            sizes.append(tree.candidates)
    both = np.array(proposing) + np.array(observing)
    timed = {"propose": proposing, "observe": observing, "both": both}
    return {name: figures(seconds[20:]) for name, seconds in timed.items()} | {
        "nodes": round(float(np.mean(sizes[20:])), 1)
    }


def figures(seconds: Any) -> dict[str, float]:
    """Microseconds."""
    median, p99 = np.percentile(np.asarray(seconds) * 1e6, (50, 99))
    return {"median": round(float(median), 1), "p99": round(float(p99), 1)}


def search_alone(nodes: int, repeats: int = 30) -> dict[str, float]:
    """The vocabulary-wide part: the likeliest 10 of each row of a verified tree."""
    logits = torch.randn(nodes + 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        top_rows(logits, 10)
        seconds.append(time.perf_counter() - begun)
    return figures(seconds[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "settings": {"nodes": options.nodes, "vocabulary": VOCAB, "unit": "microseconds"},
        "drafters": {
            name: {
                str(length): measure(make, temperature, length, options.nodes, options.repeats)
                for length in options.lengths
            }
            for name, (make, temperature) in DRAFTERS.items()
        },
        "top_rows": search_alone(options.nodes),
    }
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{'microseconds (median / p99)':<28}{'context':>9}{'nodes':>7}{'propose':>16}{'observe':>16}{'both':>16}")
    for name, lengths in result["drafters"].items():
        for length, row in lengths.items():
            cells = "".join(
                f"{row[part]['median']:>9} /{row[part]['p99']:>5.0f}" for part in ("propose", "observe", "both")
            )
            print(f"{name:<28}{length:>9}{row['nodes']:>7}{cells}")
    top = result["top_rows"]
    print(f"the likeliest 10 of {options.nodes + 1} rows of {VOCAB}: {top['median']} / {top['p99']:.0f}")


if __name__ == "__main__":
    main()
