"""A level of an EAGLE-3 draft on the CPU: torch in eight bits against kernels of our own, by rows.

A network of the shipped drafter's shape with random weights behind 300 tokens. Between calls a target's worth of memory
is read, so that nothing is left in the caches; processor time of the calling thread, interleaved rounds.
Run: python benchmarks/costs/native_level.py [--rows 1,2,4,8] [--rounds 15] [--context 300] [--json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from rows import give_rows

from outrider.core.layer_driver import LayerDriver, LayerPiece
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.runtime.layers.native import made_for
from outrider.runtime.layers.plain import PlainDriver

SHAPE = Eagle3Shape(576, 9, 3, 64, 6144, (0, 1, 2), 16384)
WIDTH = 64  # tokens of a distribution


def levels(net: Eagle3Layer, rows: int, context: int) -> dict[str, Callable[[], object]]:
    """By name, one level of so many siblings: the layer, the head and the choice."""
    embedded, state = torch.randn(2, rows, SHAPE.hidden)
    plain = PlainDriver(net, lambda tokens: embedded.view(*tokens.shape, SHAPE.hidden), packed=True)
    native = made_for(plain, 1)
    assert native is not None
    positions, sees = np.full(rows, context), np.eye(rows, dtype=bool)
    piece = LayerPiece(0, context, context, positions, sees, [0] * rows, state)

    def by(driver: LayerDriver) -> Callable[[], object]:
        return lambda: driver.distributions(driver.forward([piece]), [1.0], WIDTH)

    return {"torch": by(plain), "native": by(native)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    net = Eagle3Layer(SHAPE, torch.arange(SHAPE.vocab)).requires_grad_(False)
    memory, found = np.ones(16 << 20), []
    for rows in map(int, options.rows.split(",")):
        work = levels(net, rows, options.context)
        times: dict[str, list[float]] = {name: [] for name in work}
        for round_ in range(-2, options.rounds):
            for name, run in work.items():
                memory.sum()
                begun = time.thread_time()
                run()
                if round_ >= 0:
                    times[name].append(time.thread_time() - begun)
        found.append({"rows": rows, **{name: median(taken) * 1e3 for name, taken in times.items()}})
    give_rows(found, options.json, "rows   torch  native  (milliseconds)", "{rows:4} {torch:7.2f} {native:7.2f}")


if __name__ == "__main__":
    main()
