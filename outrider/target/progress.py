"""A bar on standard error over work that takes seconds; nothing where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def tracked(items: Sequence[T], label: str) -> Iterable[T]:
    from rich.console import Console
    from rich.progress import track

    return track(items, label, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
