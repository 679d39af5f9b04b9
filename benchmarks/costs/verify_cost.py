"""What a verdict costs on the host, from raw logits: 64 candidates, an accepted path of 4, a vocabulary of 49k.

Rows are processed lazily inside the timed call. The draft's distributions are the target's with noise on the logits;
trees and random bits are searched until the path accepted has length 4, and the median is over several of them. Chains
have 64 nodes too, and block verification needs the row of each. One thread.
Run: python benchmarks/costs/verify_cost.py [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.core.noise import DRAFT, VERIFY, StreamNoise
from outrider.core.protocols import Verifier
from outrider.core.sampling import History, SamplingParams
from outrider.core.target_rows import TargetRows
from outrider.core.tree import Draw, Law, QRow, TokenTree
from outrider.verify.block import Block
from outrider.verify.invariant import Invariant
from outrider.verify.kseq import KSeq
from outrider.verify.naive import Naive
from outrider.verify.optimal import Optimal
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from outrider.verify.traversal import Traversal

NODES, PATH, WIDTH = 64, 4, 256
SETTINGS = {
    "temperature 0": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
}
RULES: list[tuple[Verifier, Law, int]] = [  # the law and number of draws a node
    (Invariant(), Law.FIXED, 2),
    (Rejection(), Law.IID, 1),
    (Recursive(), Law.WITHOUT_REPLACEMENT, 2),
    (Recursive(), Law.IID, 2),
    (Optimal(), Law.TOP_PLUS_ONE, 2),
    (KSeq(), Law.IID, 2),
    (Naive(), Law.WITHOUT_REPLACEMENT, 2),
    (Block(), Law.IID, 1),
    (Traversal(), Law.WITHOUT_REPLACEMENT, 2),
]


@dataclass(frozen=True, slots=True)
class Models:
    """A row of logits for each node, whatever its path."""

    target: Tensor  # [NODES + 1, V]
    draft: Tensor
    history: History

    def row(self, node: int) -> QRow:
        return self.history.draft_rows(self.draft[node : node + 1], [()], WIDTH)[0]


def grow(row: Callable[[int], QRow], law: Law, draws: int, noise: StreamNoise) -> TokenTree:
    """Breadth first, `draws` at a node, until the nodes are used up."""
    tokens, parents, made = [0], [-1], list[tuple[Draw, ...]]()
    for node in range(NODES + 1):
        if node == len(tokens):
            break
        if len(tokens) + draws > NODES + 1:
            made.append(())
            continue
        drawn, children = [], dict[int, int]()
        for token, q in propose(row(node), law, draws, node, noise):
            if token not in children:
                children[token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            drawn.append(Draw(token, children[token], q))
        made.append(tuple(drawn))
    return TokenTree(np.array(tokens), np.array(parents), tuple(made))


def propose(row: QRow, law: Law, draws: int, node: int, noise: StreamNoise) -> list[tuple[int, QRow | None]]:
    points = draws if law is Law.FIXED else draws - 1 if law is Law.TOP_PLUS_ONE else 0
    found: list[tuple[int, QRow | None]] = [(int(token), None) for token in row.ids[:points]]  # likeliest first
    for token, _ in found:
        row = row.without(token)
    for j in range(draws - points):
        token = int(row.ids[noise.draw(row.probs, node, j)])
        found.append((token, row))
        row = row.without(token) if law is Law.WITHOUT_REPLACEMENT else row
    return found


def cost(verifier: Verifier, law: Law, draws: int, models: Models, cases: int, repeats: int) -> dict[str, float]:
    """Milliseconds over trees and random bits: how many draws fail on a path of one length differs between them."""
    medians: list[float] = []
    for seed in range(100 * cases):
        tree, logits = grow(models.row, law, draws, StreamNoise(seed, 0, DRAFT, 0, 1)), models.target
        if models.history.params.greedy:
            logits = _agreeing(logits, tree)
        for step in range(20):
            noise = StreamNoise(seed, 0, VERIFY, step, 1)
            if len(verifier.verify(tree, TargetRows(logits, tree, models.history), noise).path) == PATH:
                break
        else:
            continue
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            verifier.verify(tree, TargetRows(logits, tree, models.history), noise)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times) * 1e3)
        if len(medians) == cases:
            break
    if not medians:
        return {}
    return {"median_ms": round(statistics.median(medians), 3), "worst_ms": round(max(medians), 3)}


def _agreeing(logits: Tensor, tree: TokenTree) -> Tensor:
    """The target's favourite is a candidate for as long as the path is wanted, and then none."""
    logits, node = logits.clone(), 0
    for _ in range(PATH):
        below = tree.children(node)[0]
        logits[node, tree.tokens[below]] = 100.0
        node = below
    free = next(t for t in range(logits.shape[1]) if tree.child(node, t) < 0)
    logits[node, free] = 100.0
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--cases", type=int, default=8, help="trees and random bits a figure is the median of")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    target = rng.normal(size=(NODES + 1, options.vocabulary)).astype(np.float32) * 3  # peaked as a model's rows are
    draft = target + rng.normal(size=target.shape).astype(np.float32) * 0.5
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, params in SETTINGS.items():
        history = History([0], params, options.vocabulary)
        models = Models(torch.from_numpy(target), torch.from_numpy(draft), history)
        figures[name] = {
            f"{verifier.name} ({law}, {draws} a node)": cost(
                verifier, law, draws, models, options.cases, options.repeats
            )
            for verifier, law, draws in RULES
        }
    settings = {"nodes": NODES, "path": PATH, "vocabulary": options.vocabulary, "draft_width": WIDTH, "threads": 1}
    result = {"settings": settings, "cost": figures}
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, rules in figures.items():
        print(f"{name}: {NODES} candidates, {PATH} accepted, {options.vocabulary} tokens")
        for rule, figure in rules.items():
            text = (
                "no such path found" if not figure else f"{figure['median_ms']:.2f} ms   worst {figure['worst_ms']:.2f}"
            )
            print(f"  {rule:<46}{text}")


if __name__ == "__main__":
    main()
