"""What one target step costs: time against rows, next to transformers' own forward with its growing cache.

Measured in one process, interleaved, on a model of many thin layers by default, so that what is seen is mostly the
host's work. Run with `--model FOLDER` for a real one. Prints milliseconds a step, the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from outrider.core.records import NO_NEEDS, Piece
from outrider.core.tree import chain
from outrider.runtime.targets import eager_target


def thin_llama(layers: int) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096,
        )
    ).eval()  # fmt: skip


def timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(model: Any, context: int, widths: list[int], repeats: int) -> list[dict[str, float]]:
    target = eager_target(model, max_slots=1, max_context=context + 64)
    slot = target.acquire()
    prompt = torch.randint(0, 1000, (context + 1,)).tolist()
    for at in range(0, context, target.traits.prompt_rows):
        target.run([Piece(slot, prompt[:-1][at : at + target.traits.prompt_rows])], NO_NEEDS)
    plain = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt[:-1]], device=target.device), past_key_values=plain)

    def ours(rows: int) -> None:
        target.run([Piece(slot, tree=chain(prompt[-1], prompt[: rows - 1]))], NO_NEEDS)

    @torch.inference_mode()
    def theirs(rows: int) -> None:
        model(torch.tensor([prompt[:rows]], device=target.device), past_key_values=plain, use_cache=True)
        plain.crop(-rows)

    table = []
    for rows in widths:
        for _ in range(3):
            ours(rows), theirs(rows)
        pairs = [
            (timed(lambda: ours(rows), target.device), timed(lambda: theirs(rows), target.device))  # noqa: B023
            for _ in range(repeats)
        ]
        mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        table.append({"rows": rows, "outrider_ms": mine, "transformers_ms": other, "ratio": mine / other})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; a thin random Llama without it")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model).eval() if args.model else thin_llama(args.layers)
    table = measure(model.to(args.device), args.context, [1, 2, 4, 8, 16, 32], args.repeats)
    if args.json:
        print(json.dumps({"context": args.context, "steps": table}))
        return
    print(f"{'rows':>5} {'outrider ms':>12} {'transformers ms':>16} {'ratio':>6}")
    for row in table:
        print(f"{row['rows']:5} {row['outrider_ms']:12.2f} {row['transformers_ms']:16.2f} {row['ratio']:6.2f}")


if __name__ == "__main__":
    main()
