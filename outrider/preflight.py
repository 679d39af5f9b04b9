"""What is looked at before a model is loaded: a typo should cost no time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider import methods, runtimes
from outrider.memory import read_memory
from outrider.models.load import default_device, parse_device


def check_load(
    method: str, options: Mapping[str, Any] | None = None, *, model: Any = "smollm2", device: str | None = None,
    memory: str | Path | None = None, runtime: str = runtimes.AUTO_NAME, precision: str | None = None,
) -> None:  # fmt: skip
    """Refuse whatever needs no model to be refused. Arguments as of `outrider.load`."""
    methods.check(method, options)
    at = getattr(model, "device", None) if device is None else parse_device(device)
    runtimes.check(runtime, precision, default_device() if at is None else at)
    if memory is not None:
        read_memory(Path(memory))  # also what is no memory
