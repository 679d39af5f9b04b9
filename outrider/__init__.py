"""Outrider: the same output from any causal language model, several times faster, by speculative decoding.

engine = outrider.load("smollm2")
print(engine.chat("Write a haiku about rain").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider._version import __version__
from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from outrider.api import Outrider, load
    from outrider.core.generation import FinishReason, Generation, Stats
    from outrider.core.params import SamplingArguments, SamplingParams
    from outrider.dropin import generate

__all__ = [
    "FinishReason",
    "Generation",
    "Outrider",
    "OutriderError",
    "SamplingArguments",
    "SamplingParams",
    "Stats",
    "__version__",
    "generate",
    "load",
]

_HOMES = {
    "Outrider": "outrider.api",
    "load": "outrider.api",
    "generate": "outrider.dropin",
    "FinishReason": "outrider.core.generation",
    "Generation": "outrider.core.generation",
    "Stats": "outrider.core.generation",
    "SamplingArguments": "outrider.core.params",
    "SamplingParams": "outrider.core.params",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something needs them: `outrider --version` should be quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
