"""A level of an EAGLE-3 draft on the CPU: torch in eight bits against kernels of our own, by rows.

A network of the shipped drafter's shape with random weights behind 300 tokens. Between calls a target's worth of memory
is read, so that nothing is left in the caches; processor time of the calling thread, interleaved rounds.
Run: python benchmarks/native_level.py [--rows 1,2,4,8] [--rounds 15] [--context 300] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from outrider.draft.eagle3_layer import Eagle3Layer, Eagle3Shape
from outrider.draft.eagle3_native import made_for
from outrider.draft.feature_cache import FeatureCache
from outrider.draft.head_laws import head_laws
from outrider.native.team import Team
from outrider.target.packed import PackedLinears

SHAPE = Eagle3Shape(576, 9, 3, 64, 6144, (0, 1, 2), 16384)
WIDTH = 64  # tokens of a law


def levels(net: Eagle3Layer, rows: int, context: int) -> dict[str, Callable[[], object]]:
    """By name, one level of so many siblings: the layer, the head and the choice."""
    active, lone = PackedLinears(net, eight_bits=True).active, made_for(net, Team(1))
    assert lone is not None
    embedded, state = torch.randn(2, rows, SHAPE.hidden)
    cache = FeatureCache(SHAPE.kv_heads, SHAPE.head_dim, torch.float32, torch.device("cpu"))
    cache.reserve(1, context + rows)
    positions, sees = np.full(rows, context), np.eye(rows, dtype=bool)
    mask = torch.from_numpy(np.hstack([np.ones((rows, context), dtype=bool), sees]))
    group = SHAPE.heads // SHAPE.kv_heads

    def by_torch() -> object:
        with active():
            q, k, v = net.project(embedded[None], state[None], torch.from_numpy(positions)[None])
            cache.write([0], [context], [rows], k, v)
            folded = q.reshape(1, SHAPE.kv_heads, group * rows, SHAPE.head_dim)
            attended = torch.nn.functional.scaled_dot_product_attention(
                folded, *cache.read([0], context + rows), attn_mask=mask.repeat(group, 1)
            )
            states = net.finish(state[None], attended.reshape(q.shape))[0]
            return head_laws(net.logits(states), [1.0] * rows, net.ids, WIDTH)

    def by_itself() -> object:
        keys, values = cache.whole
        states = lone.forward(embedded, state, positions, sees, context, context, keys[0], values[0])
        return lone.laws(states, 1.0, WIDTH)

    return {"torch": by_torch, "native": by_itself}


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
        found.append({"rows": rows, **{name: median(own) * 1e3 for name, own in times.items()}})
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print("rows   torch  native  (milliseconds)")
    for own in found:
        print(f"{own['rows']:4} {own['torch']:7.2f} {own['native']:7.2f}")


if __name__ == "__main__":
    main()
