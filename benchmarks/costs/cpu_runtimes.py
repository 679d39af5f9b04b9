"""Step time against rows for the CPU runtimes and precisions, interleaved; and how far a precision moves the logits.

    python benchmarks/costs/cpu_runtimes.py [--model M] [--context 512] [--rounds 7] [--runtimes eager,int8] [--json -]
    python benchmarks/costs/cpu_runtimes.py --runtimes int8,int8+fixed    # with steps of fixed shapes, as after a while
    python benchmarks/costs/cpu_runtimes.py --runtimes native-int8,native-int4,int8+fixed
    python benchmarks/costs/cpu_runtimes.py --profile int8        # where one step's time goes
    python benchmarks/costs/cpu_runtimes.py --noise               # the same text in steps of other widths, bit by bit

The floor is the time to read the weights once at the measured bandwidth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from statistics import median
from typing import Any

import numpy as np
import torch

from outrider.core.protocols import Target
from outrider.core.records import GREEDY, NO_NEEDS, Piece
from outrider.core.tree import fixed
from outrider.models import load_model
from outrider.runtime import choice
from outrider.runtime.conversions import openvino_graph
from outrider.runtime.openvino.convert import PRECISIONS
from outrider.runtime.targets import openvino_target

ROWS = (1, 2, 4, 8, 16, 32)
FIXED, NATIVE = "+fixed", "native-"
BITS = {"eager": 32, "float32": 32, "int8": 8, "int8-weights": 8, "int4": 4, "int4-weights": 4}


def make(model: Any, name: str, context: int) -> Target:
    if name.startswith(NATIVE):
        return choice.build(model, "native", name[len(NATIVE) :], max_slots=1, max_context=context + 64)
    runtime, precision = ("eager", None) if name == "eager" else ("openvino", name.removesuffix(FIXED))
    target = choice.build(model, runtime, precision, max_slots=1, max_context=context + 64)
    if name.endswith(FIXED):
        target.prepare([context], NO_NEEDS)
    return target


def opened(target: Target, prompt: list[int]) -> tuple[int, float]:
    slot, begun = target.acquire(), time.perf_counter()
    for at in range(0, len(prompt) - 1, target.traits.prompt_rows):
        target.run([Piece(slot, prompt[:-1][at : at + target.traits.prompt_rows])], NO_NEEDS)
    return slot, time.perf_counter() - begun


def chain(tokens: list[int]) -> Any:
    return fixed(np.array(tokens), np.arange(len(tokens)) - 1)


def step_times(model: Any, names: list[str], context: int, rounds: int) -> dict[str, Any]:
    targets = {name: make(model, name, context) for name in names}
    prompt = [5 + i % 3000 for i in range(context + 1)]
    slots = {name: opened(target, prompt)[0] for name, target in targets.items()}
    prefill = {}
    for name, target in targets.items():  # once more: the first one makes code
        target.release(slots[name])
        slots[name], prefill[name] = opened(target, prompt)
    seen: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in names}
    for again in range(rounds + 1):
        for name, target in targets.items():
            for rows in ROWS:
                tree = fixed(np.arange(rows) + 7, np.where(np.arange(rows) > 0, (np.arange(rows) - 1) // 2, -1))
                for warm in (True, False):  # the step before leaves another runtime's weights in the caches
                    begun = time.perf_counter()
                    target.run([Piece(slots[name], tree=tree)], GREEDY)
                    if again and not warm:
                        seen[name][rows].append(1e3 * (time.perf_counter() - begun))
    times = {name: {rows: round(median(by_rows[rows]), 2) for rows in ROWS} for name, by_rows in seen.items()}
    return {
        "context": context, "threads": torch.get_num_threads(), "ms": times,
        "ms_a_row": {n: round((by_rows[16] - by_rows[1]) / 15, 2) for n, by_rows in times.items()},
        "prefill_ms": {name: round(1e3 * s) for name, s in prefill.items()},
    }  # fmt: skip


def floors(model: Any, names: list[str]) -> dict[str, float]:
    """Milliseconds to read the weights of each precision once, at the bandwidth of a sum over a gigabyte."""
    block = torch.ones(1 << 28)
    block.sum()
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - begun)
    rate = block.nbytes / median(seconds)
    weights = sum(p.numel() for p in model.parameters())
    bits = {name: BITS[name.removeprefix(NATIVE).removesuffix(FIXED)] for name in names}
    return {"GB/s": round(rate / 1e9, 1), **{name: round(1e3 * weights * bits[name] / 8 / rate, 1) for name in names}}


def profile(model: Any, name: str, context: int) -> dict[str, Any]:
    """Milliseconds by kind of operation of one step, from the plugin's own counters."""
    report = {}
    for rows in (1, 8, 32):
        target: Any = openvino_target(model, openvino_graph(model, name), precision=name, max_slots=1,
                                max_context=context + 64, self_test=False, profile=True)  # fmt: skip
        slot = opened(target, [5 + i % 3000 for i in range(context + 1)])[0]
        target.backend._compile(frozenset())  # the counters average over everything since
        walls = []
        for _ in range(7):
            begun = time.perf_counter()
            target.run([Piece(slot, tree=chain(list(range(7, 7 + rows))))], GREEDY)
            walls.append(1e3 * (time.perf_counter() - begun))
        kinds: dict[str, float] = defaultdict(float)
        for node in target.backend._any.native.get_profiling_info():
            kinds[node.node_type.removesuffix("Compressed")] += 1e3 * node.real_time.total_seconds()
        most = sorted(kinds.items(), key=lambda item: -item[1])[:8]
        report[rows] = {"wall": round(median(walls), 1), **{kind: round(ms, 2) for kind, ms in most}}
    return report


def noise(model: Any, names: list[str], context: int, tokens: int = 60) -> dict[str, Any]:
    """How far the logits of one text move when it is scored in steps of other widths; and against float32."""
    text = np.random.default_rng(0).integers(0, 20000, context + tokens).tolist()
    reference: torch.Tensor | None = None
    report = {}
    for name in dict.fromkeys(["float32", *names]):
        target = make(model, name, context + tokens)
        by_width = {}
        for width in (1, 3, 8, 17):
            slot, _ = opened(target, text[:context])
            rows, left = [], text[context - 1 : -1]
            for at in range(0, len(left), width):
                part = left[at : at + width]
                rows.append(target.run([Piece(slot, tree=chain(part))], NO_NEEDS)[0].logits)
                target.commit([slot], [list(range(1, len(part)))])
            target.release(slot)
            by_width[width] = torch.cat(rows)
        plain = by_width[1]
        reference = plain if reference is None else reference
        wanted, got = reference.log_softmax(-1), plain.log_softmax(-1)
        report[name] = {
            "largest move by width": {w: (by_width[w] - plain).abs().max().item() for w in (3, 8, 17)},
            "same bits": all(torch.equal(by_width[w], plain) for w in (3, 8, 17)),
            "KL from float32": round((wanted.exp() * (wanted - got)).sum(-1).mean().item(), 5),
            "same likeliest token": round((reference.argmax(1) == plain.argmax(1)).float().mean().item(), 3),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runtimes", default="eager," + ",".join(PRECISIONS))
    parser.add_argument("--profile", metavar="PRECISION")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    model, names = load_model(args.model, device="cpu", dtype="float32").model, args.runtimes.split(",")
    if args.profile:
        result = {"profile": args.profile, "context": args.context, "ms": profile(model, args.profile, args.context)}
    elif args.noise:
        result = noise(model, [n for n in names if n != "eager"], args.context)
    else:
        result = {**step_times(model, names, args.context, args.rounds), "floor_ms": floors(model, names)}
    text = json.dumps(result, indent=1)
    if args.json and args.json != "-":
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text)
    print(text)


if __name__ == "__main__":
    main()
