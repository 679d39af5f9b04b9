"""A model by name, whole or spread over ranks, and the target over its parts where it is spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outrider.models.files.phases import phase
from outrider.models.known import open_model
from outrider.models.loaded import LoadedModel
from outrider.runtime.ranks.leader import LeadingTarget


@contextmanager
def opened(
    model: Any, ranks: int, limits: Mapping[str, Any], *, device: str | None, **origin: Any
) -> Iterator[tuple[LoadedModel, LeadingTarget | None]]:
    """The model, and its target where `ranks` is above one; the other ranks end where an error ends the block."""
    if ranks == 1:
        with phase("read"):
            loaded = open_model(model, device=device, **origin)
        yield loaded, None
        return
    from outrider.runtime.ranks.load import load_spread

    loaded, target = load_spread(model, ranks, limits, **origin)
    try:
        yield loaded, target
    except BaseException:
        target.close()
        raise
