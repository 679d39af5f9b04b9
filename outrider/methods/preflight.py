"""What is looked at before a model is loaded: a typo should cost no time."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from outrider import methods
from outrider.core.errors import InputError
from outrider.models.load import default_device, parse_device
from outrider.runtime import choice
from outrider.store.memory import read_memory


def check_load(
    method: str, options: Mapping[str, Any] | None = None, *, model: Any = "smollm2", device: str | None = None,
    memory: str | Path | None = None, runtime: str = choice.AUTO_NAME, precision: str | None = None,
    tensor_parallel: int = 1,
) -> None:  # fmt: skip
    """Refuse whatever needs no model to be refused. Arguments as of `outrider.load`."""
    methods.check(method, options)
    at = getattr(model, "device", None) if device is None else parse_device(device)
    choice.check(runtime, precision, default_device() if at is None else at)
    if tensor_parallel != 1:
        _check_spread(model, device, runtime, precision, tensor_parallel)
    if memory is not None:
        read_memory(Path(memory))  # also what is no memory


def _check_spread(model: Any, device: str | None, runtime: str, precision: str | None, ranks: int) -> None:
    """A model over several processes is loaded by each of them, where transformers puts it, and run layer by layer."""
    if ranks < 1:
        raise InputError(f"tensor_parallel {ranks} is no number of processes; give 1 or more")
    if not isinstance(model, str | PathLike):
        raise InputError("a model that is already loaded cannot be spread over processes; give its name or folder")
    if runtime not in (choice.AUTO_NAME, "eager") or precision is not None:
        what = f"runtime {runtime}" if precision is None else f"precision {precision}"
        raise InputError(f"tensor_parallel needs the runtime eager, and cannot be had with {what}; leave that out")
    if device is not None:
        raise InputError("tensor_parallel puts a part on each GPU by itself; leave device out")
