"""Replaced: names of a model's modules, configurations or code that mean something else while a pass runs.

A model is the caller's and stays as it was; what it would look up in the course of a forward is replaced before and put
back after it, also when it fails. Not for several threads at once. Cost: some tenths of a microsecond a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    namespace: dict[str, Any]  # `vars` of a module, a configuration or a Python module
    name: str
    value: Any


_MISSING = object()


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Changes the namespaces for as long as it lasts. What is replaced twice is in the end what it was at first."""
    before = [namespace.get(name, _MISSING) for namespace, name, _ in replacements]
    try:
        for namespace, name, value in replacements:
            namespace[name] = value
        yield
    finally:
        for (namespace, name, _), value in zip(replacements, before, strict=True):
            if value is _MISSING:
                namespace.pop(name, None)
            else:
                namespace[name] = value
