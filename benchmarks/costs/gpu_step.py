"""What one step costs on a GPU: time against rows, batch and context for each runtime, beside the floor of the machine.

The floor is the larger of weights and cache over the measured bandwidth and arithmetic over the measured matrix rate.
A chip at its power limit lowers its clock, so steps that arithmetic bounds are also timed rested and loaded, against
the matrix rate in the same state. By default a Llama of 8B shape in bfloat16 with random weights, made on the GPU;
`--model FOLDER` for another. Host time is what a verify and a commit take beyond the GPU's own time. The first runtime
is measured as it grows with context and with batch, the others where the bars are. A profile of one step by kernel
comes last.

Run: python benchmarks/costs/gpu_step.py [--runtimes graphs,plain-graphs,eager] [--json FILE] [--plot FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.costs.gpu_model import SHAPES, by_kernel, pretend, random_llama, step_of, stored, tree_of
from outrider.bench.floor import bandwidth, traffic
from outrider.core.records import NO_NEEDS, Piece
from outrider.core.tree import chain
from outrider.runtime.targets import cuda_target, eager_target

Point = tuple[int, int, int]  # sequences, rows of each, context
BARS: tuple[tuple[str, float, Point, Point | None], ...] = (
    ("one sequence, one row, context 1024: over its floor", 1.20, (1, 1, 1024), None),
    ("64 rows over one row at context 1024", 1.10, (1, 64, 1024), (1, 1, 1024)),
    ("64 rows over one row at context 8192", 1.25, (1, 64, 8192), (1, 1, 8192)),
    ("16 sequences of 16 rows, context 1024: over their floor", 1.35, (16, 16, 1024), None),
)
ALSO = (16, 1, 1024)
FUSED = ("graphs", "free-graphs")
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # of one sequence
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # at BATCH_CONTEXT
BATCH_CONTEXT = 1024
CONTEXT_ROWS, BATCH_ROWS = (1, 16, 64), (1, 16)


def growth() -> list[Point]:
    context = [(1, rows, context) for context in CONTEXTS for rows in CONTEXT_ROWS]
    batch = [(batch, rows, BATCH_CONTEXT) for batch in BATCHES for rows in BATCH_ROWS]
    return list(dict.fromkeys(context + batch))


def where_the_bars_are() -> list[Point]:
    return sorted({point for bar in BARS for point in (bar[2], bar[3] or bar[2])} | {ALSO})


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations a second of a large product of random matrices."""
    size = size if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(gpu_seconds(lambda: a @ b, device) for _ in range(5))


STATES = ("rested", "loaded")


def rested_and_loaded(work: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of `work` after a pause and after half a second of nothing else: long work lowers the chip's clock."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once() -> float:
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def after_a_pause() -> float:
        time.sleep(0.1)
        return once()

    once()
    rested = statistics.median(after_a_pause() for _ in range(9))
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.5:
        once()
    return dict(zip(STATES, (rested, statistics.median(once() for _ in range(9))), strict=True))


def matrix_rates(device: torch.device, dtype: torch.dtype, size: int = 8192, repeats: int = 5) -> dict[str, float]:
    """Operations a second of large products of random matrices, as long as a wide step together."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    took = rested_and_loaded(lambda: [a @ b for _ in range(repeats)], device)
    return {state: 2 * repeats * size**3 / seconds for state, seconds in took.items()}


def gpu_seconds(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        if args.model:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=self.dtype).to(self.device).eval()
        else:
            self.model = random_llama(args.shape, self.device, self.dtype)
        small = None if self.device.type == "cuda" else 1 << 24
        self.rate = bandwidth(self.device, size=small)
        self.matrix = matrix_rate(self.device, self.dtype)
        self.rates = matrix_rates(self.device, self.dtype) if self.device.type == "cuda" else {}
        self.facts = traffic(self.model)
        self.table: list[dict[str, Any]] = []
        self.profiled: dict[int, list[dict[str, Any]]] = {}  # rows -> one step by kernel

    def moving(self, batch: int, rows: int, context: int) -> float:
        """Seconds that weights and cache take."""
        moved = self.facts["weight_bytes"] + batch * (context + rows) * self.facts["cache_bytes_per_token"]
        return float(moved / self.rate)

    def operations(self, batch: int, rows: int, context: int) -> float:
        config = self.model.config
        weights = self.facts["weight_bytes"] / self.dtype.itemsize
        looked = 4 * context * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        return batch * rows * (2 * weights + looked)

    def floor(self, batch: int, rows: int, context: int) -> float:
        return max(self.moving(batch, rows, context), self.operations(batch, rows, context) / self.matrix)

    def states(self, graph: Any, batch: int, rows: int, context: int) -> dict[str, dict[str, float]]:
        """A step that arithmetic bounds, on a rested and a loaded chip, each against the matrix rate in that state."""
        if graph is None or self.operations(batch, rows, context) / self.matrix < self.moving(batch, rows, context):
            return {}
        took = rested_and_loaded(graph.replay, self.device)
        floors = {state: self.operations(batch, rows, context) / rate for state, rate in self.rates.items()}
        return {
            state: {"gpu_ms": 1e3 * took[state], "floor_ms": 1e3 * floor, "over_floor": took[state] / floor}
            for state, floor in floors.items()
        }

    def measure(self, name: str, target: Any, batch: int, rows: int, context: int) -> None:
        rng = np.random.default_rng(0)
        trees = [tree_of(rows, rng) for _ in range(batch)]
        slots = [target.acquire() for _ in range(batch)]

        def step() -> None:
            for slot in slots:
                pretend(target, slot, context)
            target.run([Piece(slot, tree=tree) for slot, tree in zip(slots, trees, strict=True)], NO_NEEDS)
            target.commit(slots, [tree.path(len(tree) - 1) for tree in trees])

        try:
            for _ in range(3):
                step()
            graph = step_of(target, slots, trees) if target.traits.runtime == "graphs" else None
            times: list[tuple[float, float | None]] = []
            with watched(graph, self.device) as seconds:
                for _ in range(self.args.repeats):
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    begun = time.perf_counter()
                    step()
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    times.append((time.perf_counter() - begun, seconds()))
            wall = statistics.median(t for t, _ in times)
            seen = [g for _, g in times if g is not None]
            gpu = statistics.median(seen) if seen else None
            states = self.states(graph, batch, rows, context) if self.device.type == "cuda" else {}
        finally:
            for slot in slots:
                stored(target)._touched[slot] = 0  # leave the noise where it is
                target.release(slot)
        floor = self.floor(batch, rows, context)
        self.table.append({
            "runtime": name, "batch": batch, "rows": rows, "context": context, "ms": 1e3 * wall,
            "gpu_ms": None if gpu is None else 1e3 * gpu, "host_ms": None if gpu is None else 1e3 * (wall - gpu),
            "floor_ms": 1e3 * floor, "over_floor": (gpu or wall) / floor, **states,
        })  # fmt: skip
        print(line(self.table[-1]), flush=True)
        for state, found in states.items():
            print(f"{state:>44}: {found['gpu_ms']:8.3f} {'':8} {found['floor_ms']:8.3f} {found['over_floor']:6.2f}x")

    def target(self, name: str, context: int, batch: int) -> Any:
        limits = {"max_slots": batch, "max_context": context + 200, "max_rows": 128, "cache_bytes": 60 << 30}
        if self.device.type != "cuda":
            limits["cache_bytes"] = 1 << 30
        if name == "eager":
            made: Any = eager_target(self.model, **limits)
        else:
            bits = "any" if name == "free-graphs" else "same"
            made = cuda_target(self.model, warm_up=False, fuse=name != "plain-graphs", bits=bits, **limits)
            print(f"{name}: the rows' bits are {'the same in any pass' if made.traits.same_bits else 'not fixed'}")
        for block in stored(made).blocks:
            for tensor in block:
                tensor.normal_(0, 0.5)
        return made

    def run(self, name: str, points: list[Point]) -> None:
        for context in sorted({c for _, _, c in points}):
            at_context = [(b, r) for b, r, c in points if c == context]
            target = self.target(name, context, max(b for b, _ in at_context))
            for batch, rows in at_context:
                self.measure(name, target, batch, rows, context)
            if name in FUSED and context == BATCH_CONTEXT:
                self.profiled |= {rows: profile(target, rows, context) for rows in (1, 64) if (1, rows) in at_context}
            del target
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


@contextmanager
def watched(graph: Any, device: torch.device) -> Iterator[Callable[[], float | None]]:
    """Seconds that the GPU spent in the last replay of a graph, by events around it."""
    if graph is None or device.type != "cuda":
        yield lambda: None
        return
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay = graph.replay

    def timed() -> Any:
        first.record()
        out = replay()
        last.record()
        return out

    graph.replay = timed
    try:
        yield lambda: first.elapsed_time(last) / 1e3
    finally:
        graph.replay = replay


def profile(target: Any, rows: int, context: int) -> list[dict[str, Any]]:
    """Microseconds and launches of one step by kernel."""
    if target.device.type != "cuda":
        return []
    slot, tree = target.acquire(), chain(1, [2] * (rows - 1))
    pretend(target, slot, context)
    for _ in range(2):  # the second time it is recorded
        target.run([Piece(slot, tree=tree)], NO_NEEDS)
    found = by_kernel(step_of(target, [slot], [tree]).replay)
    stored(target)._touched[slot] = 0
    target.release(slot)
    return found


def line(row: dict[str, Any]) -> str:
    gpu = "       -        -" if row["gpu_ms"] is None else f"{row['gpu_ms']:8.3f} {row['host_ms']:8.3f}"
    return (
        f"{row['runtime']:>12} {row['batch']:5} {row['rows']:5} {row['context']:7} {row['ms']:8.3f} {gpu} "
        f"{row['floor_ms']:8.3f} {row['over_floor']:6.2f}x"
    )


def bars(table: list[dict[str, Any]]) -> list[str]:
    found = {(r["batch"], r["rows"], r["context"]): r for r in table if r["runtime"] == "graphs"}
    out = []
    for name, bar, point, other in BARS:
        if point not in found or (other and other not in found):
            continue
        got = found[point]["gpu_ms"] / found[other]["gpu_ms"] if other else found[point]["over_floor"]
        states = [f", {state} {found[point][state]['over_floor']:.2f}x" for state in STATES if state in found[point]]
        out.append(f"{name}: {got:.2f}x{''.join(states)} (bar {bar:.2f}x)")
    if one := found.get((1, 1, 1024)):
        out.append(f"host time of a plain step: {one['host_ms']:.3f} ms (bar 0.3 ms)")
    return out


def plot(table: list[dict[str, Any]], path: str) -> None:
    """GPU time of the first runtime against context and against batch, and what of it the machine dictates."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    first_runtime = [row for row in table if row["runtime"] == table[0]["runtime"]]
    panels = (
        ("tokens of context, one sequence", "context", [r for r in first_runtime if r["batch"] == 1]),
        (f"sequences, context {BATCH_CONTEXT}", "batch",
         [r for r in first_runtime if r["context"] == BATCH_CONTEXT and r["rows"] in BATCH_ROWS]),
    )  # fmt: skip
    with rc_context({"svg.hashsalt": "outrider", "font.size": 9}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots(1, 2)
        for axis, (label, field, rows) in zip(axes, panels, strict=True):
            for count in sorted({r["rows"] for r in rows}):
                line = sorted((r for r in rows if r["rows"] == count), key=lambda r: r[field])
                at = [r[field] for r in line]
                (drawn,) = axis.plot(
                    at, [r["gpu_ms"] or r["ms"] for r in line], ".-", label=f"{count} rows" if count > 1 else "1 row"
                )
                axis.plot(at, [r["floor_ms"] for r in line], "--", color=drawn.get_color(), linewidth=0.8, alpha=0.6)
            axis.set_xscale("log", base=2)
            axis.set_xticks(at, [str(x) for x in at])
            axis.set(xlabel=label, ylim=(0, None))
            axis.legend(frameon=False)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("GPU ms a step (dashed: floor)")
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder; a random Llama without it")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--runtimes",
        default="graphs,plain-graphs,eager",
        help="graphs, free-graphs (sums in any order), plain-graphs (not fused), eager",
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--points", help="only these: batch:rows:context with commas between them")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.svg")
    parser.add_argument("--drawn-from", metavar="FILE", help="draw an earlier run's --json instead of measuring")
    args = parser.parse_args()
    if args.drawn_from:
        plot(json.loads(Path(args.drawn_from).read_text(encoding="utf-8"))["steps"], args.plot)
        return
    bench = Bench(args)
    print(f"bandwidth {bench.rate / 1e12:.2f} TB/s, matrix rate {bench.matrix / 1e12:.0f} TFLOP/s, "
          f"weights {bench.facts['weight_bytes'] / 1e9:.2f} GB")  # fmt: skip
    if bench.rates:
        print(", ".join(f"matrix rate {state} {rate / 1e12:.0f} TFLOP/s" for state, rate in bench.rates.items()))
    given: list[Point] = [tuple(map(int, p.split(":"))) for p in args.points.split(",")] if args.points else []  # type: ignore[misc]
    print(f"{'runtime':>12} batch  rows context       ms   gpu ms  host ms floor ms   over")
    for i, name in enumerate(args.runtimes.split(",")):
        try:
            bench.run(name, given or (where_the_bars_are() if i else growth()))
        except Exception:
            traceback.print_exc()
        if args.json:  # after every runtime: what was measured stays, should the next one fail
            made = {"bandwidth": bench.rate, "matrix_rate": bench.matrix, "matrix_rates": bench.rates, **bench.facts,
                    "steps": bench.table, "profile": bench.profiled}  # fmt: skip
            Path(args.json).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for count, kernels in bench.profiled.items():
        print(f"one step of {count} rows by kernel:")
        for row in kernels[:14]:
            print(f"  {row['us']:9.1f} us {row['launches']:4} launches  {row['kernel']}")
    print("\n".join(bars(bench.table)))
    if args.plot:
        plot(bench.table, args.plot)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
