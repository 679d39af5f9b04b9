"""The memory floor: no step can end before weights and cache were read once, at the bandwidth this machine reaches.

Bandwidth is measured, not looked up: the highest rate at which all threads (or the GPU) read a buffer that no cache
holds. Costs about a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from outrider.runtime.choice import ran

if TYPE_CHECKING:
    from outrider.api import Outrider

BUFFER_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
REPEATS = 5


def bandwidth(device: torch.device, repeats: int = REPEATS, size: int | None = None) -> float:
    """Bytes a second, the best of some passes of two kinds: a sum, and the matrix-vector product of a decode step."""
    width = 4096
    count = max((size or BUFFER_BYTES.get(device.type, 512 << 20)) // 4 // width, 1)
    matrix = torch.ones(count, width, device=device)
    vector = torch.ones(width, device=device)
    best = 0.0
    with torch.inference_mode():
        for work in (lambda: matrix.sum(), lambda: matrix @ vector):
            for _ in range(repeats):
                _wait(device)
                begun = time.perf_counter()
                work()
                _wait(device)
                elapsed = time.perf_counter() - begun
                best = max(best, matrix.numel() * 4 / elapsed if elapsed else 0.0)
    return best


def traffic(model: Any) -> dict[str, Any]:
    """What a decode step of this model must read: bytes of weights, and of cache for each token of context."""
    parameters = getattr(model, "parameters", None)
    if parameters is None:
        return {}
    weights = sum(p.numel() * p.element_size() for p in parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    if head is None or head.weight is not embedding:  # of embeddings that are not the head a step reads a row
        weights -= embedding.numel() * embedding.element_size()
    return {"weight_bytes": weights, "cache_bytes_per_token": cache_bytes(model.config, embedding.element_size())}


def runtime_traffic(engine: Outrider) -> dict[str, Any]:
    """Likewise as the engine's runtime holds the weights, with the name of that form as `dtype`."""
    facts = traffic(engine.loaded.model)
    if held := engine.target.traits.weight_bytes:
        facts["weight_bytes"] = held
    return facts | {"dtype": ran(engine.target, engine.loaded.model)["precision"]}


def cache_bytes(config: Any, size: int) -> int:
    """Keys and values of one token in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * size)


def floor_seconds(facts: Mapping[str, Any], rate: float | None, steps: float, context: float) -> float | None:
    """Seconds that `steps` steps take at least, with `context` tokens of all their sequences together in the cache."""
    if not rate or not facts.get("weight_bytes"):
        return None
    return float(steps * (facts["weight_bytes"] + context * facts.get("cache_bytes_per_token", 0)) / rate)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
