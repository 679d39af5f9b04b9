"""What passes of many sequences cost on a GPU: plain steps, trees, prompts, and prompts beside answers.

A Llama of 8B shape in bfloat16 with random weights, made on the GPU, with the runtime `graphs`. GPU time is that of the
recorded passes by events around them, host time what passes and commits take beyond that, both medians; `first_ms` is
what the first three rounds take together, in which passes are made and recorded. One JSON object a line, as it is
measured, the longest kernels of some passes among them. Takes less than two minutes on an H200.

Run: python benchmarks/costs/gpu_company.py [--shape 8b|tiny] [--device cuda|cpu] [--context 1024] [--repeats 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.costs.gpu_model import SHAPES, by_kernel, pretend, random_llama, stored, tree_of
from outrider.core.records import NO_NEEDS, Piece
from outrider.runtime.targets import cuda_target

TREES = ((1, 1), (4, 1), (16, 1), (64, 1), (16, 4), (16, 16), (64, 4), (64, 8), (1, 16), (4, 16), (64, 16))
RAGGED = (1, 1, 2, 3, 4, 6, 8, 10, 12, 16, 16, 16)  # rows of one tree after another
PROMPTS = {"one prompt": [[512]], "five prompts": [[103, 102, 103, 102, 102]], "a long prompt": [[512], [512], [476]]}
MIXED = {"a prompt beside 64 answers": (256, 64, 1), "a prompt beside 8 trees": (512, 8, 16)}
PROFILED = ("64 x 1", "64 x 8", "one prompt")
Pass = Sequence[tuple[int, Piece]]  # tokens of text that a slot has before it, and what it has in the pass


class Company:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.context, self.repeats = torch.device(args.device), args.context, args.repeats
        begun = time.perf_counter()
        model = random_llama(args.shape, self.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
        made = time.perf_counter()
        self.target: Any = cuda_target(
            model, warm_up=False, max_slots=64, max_context=max(args.context, 1500) + 200, max_rows=128,
            cache_bytes=40 << 30,
        )  # fmt: skip
        if self.device.type == "cuda":
            for block in stored(self.target).blocks:
                for tensor in block:
                    tensor.normal_(0, 0.5)
        self.slots = [self.target.acquire() for _ in range(self.target.slots)]
        say(what="load", model_s=made - begun, target_s=time.perf_counter() - made, torch=torch.__version__)

    def trees(self, rows: Sequence[int]) -> list[tuple[int, Piece]]:
        rng = np.random.default_rng(0)
        pieces = [Piece(slot, tree=tree_of(n, rng)) for slot, n in zip(self.slots, rows, strict=False)]
        return [(self.context, piece) for piece in pieces]

    def texts(self, rows: Sequence[int], before: int = 0) -> list[tuple[int, Piece]]:
        return [(before, Piece(slot, [1] * n)) for slot, n in zip(self.slots[::-1], rows, strict=False)]

    def run(self, passes: Sequence[Pass]) -> None:
        for part in passes:
            for length, piece in part:
                pretend(self.target, piece.slot, length)
            self.target.run([piece for _, piece in part], NO_NEEDS)
            trees = {piece.slot: piece.tree for _, piece in part if piece.tree is not None}
            self.target.commit(list(trees), [tree.path(len(tree) - 1) for tree in trees.values()])

    def measure(self, what: str, passes: Sequence[Pass]) -> None:
        begun = self.now()
        for _ in range(3):
            self.run(passes)
        first = self.now() - begun
        steps = list(self.target.backend.recordings.steps.values())
        kept = [step.replay for step in steps]
        ran: list[tuple[Any, Callable[[], float]]] = []
        for step in steps:
            step.replay = self.watched(step, ran)
        walls, seen = [], []
        for _ in range(self.repeats):
            ran.clear()
            begun = self.now()
            self.run(passes)
            walls.append(self.now() - begun)
            seen.append(sum(milliseconds() for _, milliseconds in ran))
        for step, replay in zip(steps, kept, strict=True):
            step.replay = replay
        gpu, last = statistics.median(seen), ran[-1][0]
        say(
            what=what, rows=sum(len(piece.tree or piece.tokens) for part in passes for _, piece in part),
            recorded_rows=[step.bucket.rows for step, _ in ran], graphs=all(step.graph for step, _ in ran), gpu_ms=gpu,
            host_ms=statistics.median(walls) - gpu, first_ms=first,
        )  # fmt: skip
        if what in PROFILED and self.device.type == "cuda":
            say(what=what, kernels=by_kernel(last.replay)[:10])

    def now(self) -> float:
        """Milliseconds, when the device has done all it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def watched(self, step: Any, ran: list[tuple[Any, Callable[[], float]]]) -> Callable[[], Any]:
        """A replay that notes how long it takes on the device."""
        replay = step.replay

        def timed() -> Any:
            if self.device.type != "cuda":
                begun = self.now()
                out = replay()
                took = self.now() - begun
                ran.append((step, lambda: took))
                return out
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            out = replay()
            last.record()
            ran.append((step, lambda: first.elapsed_time(last)))
            return out

        return timed


def say(**facts: Any) -> None:
    rounded = {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in facts.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=20)
    company = Company(parser.parse_args())
    for sequences, rows in TREES:
        company.measure(f"{sequences} x {rows}", [company.trees([rows] * sequences)])
    company.measure("ragged trees", [company.trees(RAGGED)])
    for what, rounds in PROMPTS.items():
        befores = [sum(sum(texts) for texts in rounds[:i]) for i in range(len(rounds))]
        parts = [company.texts(texts, before) for texts, before in zip(rounds, befores, strict=True)]
        company.measure(what, parts)
    for what, (text, sequences, rows) in MIXED.items():
        answers = company.trees([rows] * min(sequences, len(company.slots) - 1))
        company.measure(what, [[*answers, *company.texts([text])]])
    backend = company.target.backend
    graphs = sum(step.graph for step in backend.recordings.steps.values())
    say(what="recordings", graphs=graphs, bytes=backend._used, shelf=company.target.backend._shelf.bytes)


if __name__ == "__main__":
    main()
