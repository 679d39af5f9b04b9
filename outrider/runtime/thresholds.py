"""Settings from which on a model computes differently, moved near for a check: windows, chunks, scales, rope switches.

A check of a dozen tokens does not meet what begins at position 4,096. Here the numbers themselves become small, in the
model's configurations and in the modules that hold copies, so that the model and the runtime both meet them at once.
Where a rope would change all earlier keys the context ends; that end is moved near, and not passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from outrider.runtime.support import ropes

NEAR = 5  # tokens: several times this fits into the check's longest text
END = 16  # where the context ends then, if a rope switches at its end: less than that text
_MASKS = ("window", "chunk_size")  # parts of the names of settings that shape a mask
_OTHERS = ("layer", "pattern", "feed_forward", "use_")  # parts of names that hold one of those and count no tokens
_ORIGINAL = "original_max_position_embeddings"


@contextmanager
def moved_near(model: Any, context: int, *, masks_only: bool = False) -> Iterator[list[str]]:
    """Changes the model for the duration; yields what was moved: what a text of `context` tokens would meet.

    `masks_only`: for a runtime that has all else in a graph already.
    """
    kinds = {str(rope.get("rope_type")) for config in _configs(model) for rope in _ropes_of(config)}
    near = {} if masks_only else _by_name(kinds)
    moved: set[str] = set()
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    tensors: list[tuple[Tensor, Tensor]] = []
    try:
        for place in _places(model):
            for name, value in list(place.items()):
                to = NEAR if _is_mask(name) else near.get(name, 0)
                if type(value) not in (int, float) or not 0 < to < value <= context:
                    continue
                if not before or before[-1][0] is not place:
                    buffers = place.get("_buffers", {})
                    before += [(buffers, dict(buffers)), (place, dict(place))]
                    tensors += [(t, t.clone()) for t in buffers.values() if t is not None]
                place[name] = type(value)(to)
                moved.add(f"{name} {value}")
        yield sorted(moved)
    finally:
        for place, held in before:
            place.clear()
            place.update(held)
        for tensor, kept in tensors:  # a rope that switched in spite of all wrote into its frequencies
            tensor.copy_(kept)


def _by_name(rope_kinds: set[str]) -> dict[str, int]:
    near = {"floor_scale": NEAR, _ORIGINAL: END if "longrope" in rope_kinds else NEAR}
    if any("dynamic" in kind for kind in rope_kinds):
        near |= dict.fromkeys(("max_position_embeddings", "max_seq_len_cached", "original_max_seq_len"), END)
    return near


def _is_mask(name: str) -> bool:
    return any(part in name for part in _MASKS) and not any(part in name for part in _OTHERS)


def _places(model: Any) -> Iterator[dict[str, Any]]:
    """Wherever a setting may be written: configurations, their ropes, and modules."""
    for config in _configs(model):
        yield vars(config)
        yield from _ropes_of(config)
    yield from (module.__dict__ for module in model.modules())


def _configs(model: Any) -> list[Any]:
    found = [model.config, model.config.get_text_config(decoder=True)]
    found += [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    return list({id(config): config for config in found if hasattr(config, "__dict__")}.values())


def _ropes_of(config: Any) -> list[dict[str, Any]]:
    return list(ropes(getattr(config, "rope_parameters", None)))
