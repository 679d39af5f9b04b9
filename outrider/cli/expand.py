"""Options in groups: a command's parameter whose type is a dataclass becomes one command-line option a field."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with a flat signature, as typer reads it; the groups are filled before the call."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    kinds: dict[str, Any] = {p.name: p.annotation for p in parameters}
    groups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}
    flat: list[inspect.Parameter] = []
    for parameter in parameters:
        group = groups.get(parameter.name)
        flat.extend(inspect.signature(group, eval_str=True).parameters.values() if group else [parameter])

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    call.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call
