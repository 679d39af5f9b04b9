"""How a captured step's kernels follow each other: on Hopper and later, a launch gets ready while the last one ends.

Programmatic dependent launch: a kernel may be put on the chip early and waits itself for what it reads. Before that our
kernels touch only what no launch in flight writes: weights, committed keys, the inputs of the step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

ARRIVALS = 1 << 14  # counters of one kind of launch

_counters: dict[tuple[torch.device, int, str], Tensor] = {}


@cache
def overlapping(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def hopper(device: torch.device) -> bool:
    """Whether the chip has this generation's matrix unit and Triton speaks to it (in Gluon, which older ones lack)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the chip; off a GPU those of the one that shapes were chosen on."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take; where torch does not say, what every chip since 2020 has."""
    if device.type != "cuda":
        return 232448
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101376))


def launch(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch."""
    return {"OVERLAP": True, "launch_pdl": True} if overlapping(device) else {"OVERLAP": False}


def counters(device: torch.device, count: int) -> Tensor:
    """Counters of arrival, all zero; whoever comes last leaves them so. One launch after another uses them."""
    return _zeros(device, count, "arrivals")


def rounds(device: torch.device, count: int) -> Tensor:
    """Counters that only rise, so that nobody has to clear up at the end of a launch."""
    return _zeros(device, count, "rounds")


def _zeros(device: torch.device, count: int, kind: str) -> Tensor:
    size = max(ARRIVALS, triton.next_power_of_2(count))  # a larger one is another tensor: recordings keep theirs
    if (device, size, kind) not in _counters:
        _counters[device, size, kind] = torch.zeros(size, dtype=torch.int32, device=device)
    return _counters[device, size, kind]
