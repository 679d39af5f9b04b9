"""From what a command line says to an engine and its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.models.load import load_tokenizer
from outrider.serve.link.seam import EngineLink
from outrider.serve.settings import Settings
from outrider.serve.text import Text


def make_link(
    load: Mapping[str, Any], settings: Settings, *, in_process: bool = False, spare: bool = False, save_s: float = 60.0,
    replicas: int = 1,
) -> EngineLink:  # fmt: skip
    """The engine behind a server: in a process of its own, in this one, or several. `load` is what `outrider.load`
    takes."""
    limits: dict[str, Any] = {
        "max_waiting": settings.max_waiting, "traces": settings.traces, "max_gap_ms": settings.max_gap_ms,
        "learn": settings.learn,
    }  # fmt: skip
    if replicas > 1:
        from outrider.serve.replicas.link import ReplicasLink

        return ReplicasLink(load, replicas, limits=limits)
    if in_process:
        from outrider.api import load as load_engine
        from outrider.serve.link.local import LocalLink

        return LocalLink(lambda: load_engine(**load), **limits)
    from outrider.serve.process.link import ProcessLink

    return ProcessLink(load, limits=limits, spare=spare, save_s=save_s)


def text_of(model: str, trust_remote_code: bool = False) -> Text:
    """The model's tokenizer and template, without its weights."""
    return Text(load_tokenizer(model, trust_remote_code=trust_remote_code), model)
