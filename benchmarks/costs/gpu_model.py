"""What benchmarks of steps on a GPU share: a model of random weights, texts that are only pretended, and profiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.records import NO_NEEDS, Piece
from outrider.core.tree import TokenTree, fixed, root
from outrider.runtime.cuda.packing import smallest
from outrider.runtime.cuda.sizes.recordings import Size

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip


def random_llama(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072, tie_word_embeddings=False)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval().requires_grad_(False)


def tree_of(rows: int, rng: np.random.Generator) -> TokenTree:
    if rows == 1:
        return root(1)
    parents = np.array([-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, rows))])
    return fixed(rng.integers(0, 1000, rows), parents)


def pretend(target: Any, slot: int, context: int) -> None:
    """As if so much text were committed; the cache is full of noise. What the last commit moves waits as ever."""
    del target._texts._texts[slot].tokens[context:]
    target._texts.append(slot, np.zeros(context - target.length(slot), dtype=np.int64))


def step_of(target: Any, slots: Sequence[int], trees: Sequence[TokenTree]) -> Any:
    """What runs a pass over these trees."""
    blocks = [target._block(Piece(slot, tree=tree)) for slot, tree in zip(slots, trees, strict=True)]
    recordings = target.backend.recordings
    return recordings.at(recordings.find(Size.of(smallest(blocks, NO_NEEDS), NO_NEEDS)))


def stored(target: Any) -> Any:
    """The `SlotCache` of an eager target, or of one that records steps."""
    return getattr(target.backend.cache, "rows", target.backend.cache)


def by_kernel(replay: Callable[[], object]) -> list[dict[str, Any]]:
    """Microseconds and launches of what is replayed, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            sums[event.name[:60]][0] += event.device_time_total / 3
            sums[event.name[:60]][1] += 1
    found = [{"kernel": k, "us": us, "launches": round(n / 3)} for k, (us, n) in sums.items()]
    return sorted(found, key=lambda row: -row["us"])
