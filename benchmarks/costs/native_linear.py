"""Native products: how fast weights are read and multiplied, by bits, rows and threads, beside torch.

The matrix is larger than the caches, as a model's are together. Medians of interleaved rounds.
Run: python benchmarks/costs/native_linear.py [--rows 1,2,4,8,16] [--threads 1,2] [--columns 576] [--megabytes 64]
     [--json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from rows import give_rows

from outrider.core.numeric.compiled import compiled
from outrider.runtime.native.kernels.linear import (
    group_sums,
    multiply,
    multiply_float,
    multiply_int4,
    pack,
    quantize,
    share,
)
from outrider.runtime.native.kernels.team import Team


@compiled
def eight(me, count, sync, values, scales, q, qscales, out):  # type: ignore[no-untyped-def]
    low, high = share(out.shape[1], me, count)
    multiply(values, scales, q, qscales, out, low, high)


@compiled
def four(me, count, sync, values, scales, q, sums, qscales, out):  # type: ignore[no-untyped-def]
    low, high = share(out.shape[1], me, count)
    multiply_int4(values, scales, q, sums, qscales, out, low, high)


@compiled
def full(me, count, sync, values, x, out):  # type: ignore[no-untyped-def]
    low, high = share(out.shape[1], me, count)
    multiply_float(values, x, out, low, high)


def jobs(size: int, columns: int, rows: int) -> dict[str, tuple[int, Callable[[Team], object]]]:
    """By name: bytes that one product reads, and the product."""
    weight = np.random.default_rng(0).normal(size=(size // 4, columns)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
    made: dict[str, tuple[int, Callable[[Team], object]]] = {}
    packed = {bits: pack(np.tile(weight, (copies, 1)), bits) for bits, copies in ((8, 4), (4, 8), (32, 1))}
    q, qscales = np.empty((rows, packed[8].padded), np.int16), np.empty(rows, np.float32)
    quantize(x, q, qscales, 0, rows)
    sums = np.empty((rows, packed[8].padded // 32), np.float32)
    group_sums(q, sums, 0, rows)
    out = {bits: np.empty((rows, matrix.rows), np.float32) for bits, matrix in packed.items()}
    size_of = {bits: matrix.values.nbytes + matrix.scales.nbytes for bits, matrix in packed.items()}
    v, s = {b: p.values for b, p in packed.items()}, {b: p.scales for b, p in packed.items()}
    made["8 bits"] = size_of[8], lambda team: team.run(eight, v[8], s[8], q, qscales, out[8])
    made["4 bits"] = size_of[4], lambda team: team.run(four, v[4], s[4], q, sums, qscales, out[4])
    made["float32"] = size_of[32], lambda team: team.run(full, v[32], x, out[32])
    theirs, given = torch.from_numpy(weight), torch.from_numpy(x)
    made["torch float32"] = weight.nbytes, lambda _team: torch.nn.functional.linear(given, theirs)
    linear = torch.nn.Linear(columns, packed[8].rows, bias=False)
    whole = torch.ao.nn.quantized.dynamic.Linear(columns, packed[8].rows, bias_=False)
    qweight = torch.quantize_per_channel(linear.weight.detach(), torch.full((packed[8].rows,), 0.01),
                                         torch.zeros(packed[8].rows, dtype=torch.long), 0, torch.qint8)  # fmt: skip
    whole.set_weight_bias(qweight, None)
    made["torch int8"] = size_of[8], lambda _team: whole(given)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--columns", type=int, default=576)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for threads in map(int, options.threads.split(",")):
        team = Team(threads)
        torch.set_num_threads(threads)
        for rows in map(int, options.rows.split(",")):
            work = jobs(options.megabytes * 1_000_000 // options.columns, options.columns, rows)
            times: dict[str, list[float]] = {name: [] for name in work}
            with torch.inference_mode():
                for round_ in range(-1, options.rounds):
                    for name, (_, run) in work.items():
                        begun = time.perf_counter()
                        run(team)
                        if round_ >= 0:
                            times[name].append(time.perf_counter() - begun)
            for name, (size, _) in work.items():
                seconds = median(times[name])
                products = rows * options.megabytes * 1e6 / {"4": 0.5, "f": 4}.get(name.removeprefix("torch ")[0], 1)
                found.append({"threads": threads, "rows": rows, "weights": name, "milliseconds": seconds * 1e3,
                              "gigabytes_per_second": size / seconds / 1e9,
                              "gigaproducts_per_second": products / seconds / 1e9})  # fmt: skip
    heading = "threads rows  weights            ms   GB/s Gproducts/s"
    give_rows(found, options.json, heading, "{threads:7} {rows:4}  {weights:13} {milliseconds:7.2f} "
              "{gigabytes_per_second:6.1f} {gigaproducts_per_second:11.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
