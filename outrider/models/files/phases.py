"""How long the phases of a start took, as they are met: reading, packing, checking, trials, drafters.

Whoever wants to know surrounds the start with `recorded`; without it `phase` does nothing. A phase within another one
counts for itself alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.core.protocols import Target


@dataclass(slots=True)
class _Record:
    seconds: dict[str, float] = field(default_factory=dict)
    inner: list[float] = field(default_factory=list)  # of each phase that runs: what phases within it have taken


_current: ContextVar[_Record | None] = ContextVar("outrider_phases", default=None)


@contextmanager
def recorded() -> Iterator[dict[str, float]]:
    """Seconds by phase, in the order in which they began to count; filled while it lasts."""
    record = _Record()
    token = _current.set(record)
    try:
        yield record.seconds
    finally:
        _current.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    record = _current.get()
    if record is None:
        yield
        return
    record.inner.append(0.0)
    begun = time.perf_counter()
    try:
        yield
    finally:
        taken = time.perf_counter() - begun
        record.seconds[name] = record.seconds.get(name, 0.0) + taken - record.inner.pop()
        if record.inner:
            record.inner[-1] += taken


def footprint(target: Target) -> dict[str, int]:
    """Bytes of memory of a target and of this process; weights that are mapped count there as far as they were read."""
    held = {"weights": target.traits.weight_bytes or 0, "cache at most": getattr(target, "cache_bytes", 0)}
    return held | {"process at most": most_memory()}


def most_memory() -> int:
    """Bytes that this process had in memory at once, at most; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
