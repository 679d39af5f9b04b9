"""How a captured step's kernels follow each other: on Hopper and later, a launch gets ready while the last one ends.

Programmatic dependent launch: a kernel may be put on the chip early and waits itself for what it reads. All of our
kernels wait first of all, except that a projection asks for the head of its weights before, which nothing writes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def overlapping(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


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
