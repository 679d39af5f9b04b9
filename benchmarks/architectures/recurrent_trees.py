"""Trees on models with recurrent layers: one pass over a tree against a chain of as many rows, and against its levels.

    python benchmarks/architectures/recurrent_trees.py [--shape mamba2,hybrid] [--layers N] [--hidden N] [--nodes 32]
        [--context 512] [--device cuda] [--dtype bfloat16] [--rounds 30] [--json FILE]

Models have random weights in the sizes of a model of 1.3 billion parameters unless told otherwise. A tree has two
children at each node. `levels` is what a runtime does that cannot branch a state: a forward of the model for each level
of the tree. Recorded passes are launched at once; the others operation by operation. Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import BambaConfig, BambaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from outrider.core.records import NO_NEEDS, Piece
from outrider.core.tree import TokenTree, chain, fixed
from outrider.runtime.recurrent.recorded import AFTER
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target


def mamba2(hidden: int, layers: int) -> Any:
    return Mamba2ForCausalLM(
        Mamba2Config(
            hidden_size=hidden, num_hidden_layers=layers, state_size=128, head_dim=64, expand=2, n_groups=1,
            num_heads=2 * hidden // 64, vocab_size=50288, tie_word_embeddings=True,
        )
    )  # fmt: skip


def hybrid(hidden: int, layers: int) -> Any:
    """Every eighth layer is one of attention; all have a feed-forward part, so half as many make up as much."""
    return BambaForCausalLM(
        BambaConfig(
            hidden_size=hidden, num_hidden_layers=layers // 2, intermediate_size=2 * hidden, mamba_d_state=128,
            mamba_d_head=64, mamba_n_heads=2 * hidden // 64, mamba_expand=2, mamba_n_groups=1, num_attention_heads=16,
            num_key_value_heads=8, attn_layer_indices=list(range(4, layers // 2, 8)), vocab_size=50288,
            max_position_embeddings=4096, tie_word_embeddings=True,
        )
    )  # fmt: skip


SHAPES: dict[str, Callable[[int, int], Any]] = {"mamba2": mamba2, "hybrid": hybrid}


def binary(nodes: int) -> TokenTree:
    rows = np.arange(nodes)
    return fixed(rows + 7, np.where(rows > 0, (rows - 1) // 2, -1))


def timed(target: SlotTarget, run: Callable[[], Any], rounds: int) -> float:
    """Milliseconds."""
    seen = []
    for again in range(rounds + AFTER + 3):
        _wait(target)
        begun = time.perf_counter()
        run()
        _wait(target)
        if again >= AFTER + 3:
            seen.append(1e3 * (time.perf_counter() - begun))
    return round(median(seen), 3)


def _wait(target: SlotTarget) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def measured(target: SlotTarget, nodes: int, context: int, rounds: int) -> dict[str, Any]:
    slot = target.acquire()
    text = [5 + i % 3000 for i in range(context)]
    for begin in range(0, context, 256):
        target.run([Piece(slot, text[begin : begin + 256])], NO_NEEDS)
    tree, straight, one = binary(nodes), chain(7, list(range(8, 7 + nodes))), chain(7, [])
    starts = [0, *(2**level - 1 for level in range(1, nodes.bit_length() + 1) if 2**level - 1 < nodes), nodes]

    def levels() -> Any:
        for done, behind in itertools.pairwise(starts):
            part = fixed(tree.tokens[:behind], tree.parents[:behind])
            scores = target.run([Piece(slot, tree=part, done=done)], NO_NEEDS)
        return scores

    def whole() -> Any:
        return target.run([Piece(slot, tree=tree)], NO_NEEDS)

    together, apart = whole()[0].logits, levels()[0].logits
    last = together[starts[-2] :].float()
    report = {
        "largest difference": round(float((last - apart.float()).abs().max() / last.abs().max()), 5),
        "one row": timed(target, lambda: target.run([Piece(slot, tree=one)], NO_NEEDS), rounds),
        "tree": timed(target, whole, rounds),
        "chain": timed(target, lambda: target.run([Piece(slot, tree=straight)], NO_NEEDS), rounds),
        "levels": timed(target, levels, max(3, rounds // 5)),
    }
    path = [1, 3, 7]

    def committed() -> float:
        """Milliseconds of the commit alone; the text grows by a few tokens each time."""
        whole()
        _wait(target)
        begun = time.perf_counter()
        target.commit([slot], [path])
        _wait(target)
        return 1e3 * (time.perf_counter() - begun)

    report["commit"] = round(median([committed() for _ in range(2 * AFTER + rounds)][2 * AFTER :]), 3)
    report["levels over tree"] = round(report["levels"] / report["tree"], 2)
    report["tree over chain"] = round(report["tree"] / report["chain"], 3)
    target.release(slot)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mamba2,hybrid")
    sizes = (("layers", 48), ("hidden", 2048), ("nodes", 32), ("context", 512), ("rounds", 30))
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    report: dict[str, Any] = {"nodes": args.nodes, "context": args.context, "device": args.device, "dtype": args.dtype}
    for shape in args.shape.split(","):
        torch.manual_seed(0)
        with torch.device(args.device):
            model = SHAPES[shape](args.hidden, args.layers).to(getattr(torch, args.dtype)).eval().requires_grad_(False)
        report[f"{shape} parameters"] = sum(weight.numel() for weight in model.parameters())
        for name in ("recorded", "not recorded"):
            if name == "recorded" and args.device == "cpu":
                continue
            target = eager_target(
                model, recorded=name == "recorded", max_slots=1, max_context=2048, max_rows=args.nodes + 1,
                self_test=False,
            )  # fmt: skip
            report[f"{shape} {name}"] = measured(target, args.nodes, args.context, args.rounds)
            if name == "recorded":
                report[f"{shape} sizes"] = [str(size) for size in target.backend.recorded.sizes]
            print(shape, name, json.dumps(report[f"{shape} {name}"]), flush=True)
            del target
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(report, indent=1), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
