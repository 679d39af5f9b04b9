"""Compiles the native step in a process of its own, which leaves it in the cache on disk and gives its memory back.

The compiler keeps as much memory as a small model takes. `python -m outrider.runtime.native.compiling PRECISION` runs
the step of a model of a few numbers; a process that has weights to pack meanwhile finds it compiled. Where that does
not work, it compiles by itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from outrider.models.files.phases import phase

log = logging.getLogger("outrider")
WORTH_IT = 1 << 25  # parameters; a smaller model is packed before a process has begun
PARENT = Path(__file__).parents[3]  # where that process finds this package
DIM, WIDE = 16, 32


@contextmanager
def compiled_meanwhile(precision: str, parameters: int) -> Iterator[None]:
    """Whatever else is done, the step is compiled at the end of it."""
    if parameters < WORTH_IT:
        yield
        return
    places = [str(PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", __name__, precision]
    try:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        log.info("the step is compiled in this process: %s", error)
        yield
        return
    try:
        yield
        with phase("compile"):
            ended = process.wait()
        if ended:
            log.info("the step is compiled in this process: another one ended with %d", ended)
    finally:
        process.kill()
        process.wait()


def run_once(precision: str) -> None:
    """Text and a tree through every call of a backend."""
    import torch

    from outrider.core.records import GREEDY, NO_NEEDS, Piece
    from outrider.core.tree import fixed
    from outrider.runtime.native.backend import NativeBackend
    from outrider.runtime.slots import SlotTarget

    torch.set_num_threads(1)
    target = SlotTarget(NativeBackend(None, precision=precision, held=_tiny(precision)), max_slots=1, max_rows=2)
    slot = target.acquire()
    target.run([Piece(slot, [1, 2])], NO_NEEDS)
    target.run([Piece(slot, tree=fixed(np.array([3, 4]), np.array([-1, 0])))], GREEDY)
    target.commit([slot], [[1]])


def _tiny(precision: str) -> Any:
    """What a backend needs of a model of one layer."""
    from outrider.runtime.native.held import Held, Rotary
    from outrider.runtime.native.kernels.linear import pack
    from outrider.runtime.native.kernels.products import single
    from outrider.runtime.native.kernels.screen import no_screen, screen_of
    from outrider.runtime.native.kernels.step import Sizes, Weights
    from outrider.runtime.native.model import BITS, table_bits

    bits = BITS[precision]
    matrix = np.eye(WIDE, dtype=np.float32)
    table = single(pack(matrix, table_bits(bits)))
    norm, none = np.ones((1, WIDE), np.float32), np.zeros((1, 0), np.float32)
    product, shares = single(pack(matrix, bits)), single(pack(np.ones((3 * DIM, WIDE), np.float32), bits))
    narrow = single(pack(np.ones((WIDE, DIM), np.float32), bits))
    weights = Weights(
        table, norm, norm, norm[0], none, none, np.zeros(1, np.int64),
        screen_of(matrix) if bits == 32 else no_screen(), shares, narrow, product, product, product, table,
    )  # fmt: skip
    sizes = Sizes(1, 1, DIM, 1.0, 1e-5)
    return Held(weights, sizes, 1, WIDE, WIDE, (64, "it is made up"), Rotary((1.0,) * (DIM // 2), 1.0))


if __name__ == "__main__":
    run_once(sys.argv[1])
