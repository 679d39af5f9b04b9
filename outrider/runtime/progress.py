"""What is said while work takes seconds: a bar on standard error where somebody looks, a line in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

log = logging.getLogger("outrider")
T = TypeVar("T")


def tracked(items: Sequence[T], label: str) -> Iterable[T]:
    from rich.console import Console
    from rich.progress import track

    return track(items, label, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def told_if_slow(what: str, after: float = 1.5) -> Iterator[None]:
    """Says so where getting ready takes a while: silence would look like a hang."""
    timer = threading.Timer(after, log.warning, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def told_if_compiling(what: str, after: float = 1.5) -> Iterator[None]:
    """Says so where functions are compiled, because no earlier run has left them in the cache, and it takes a while."""
    from numba.core import event

    class Compiling(event.Listener):  # type: ignore[misc]
        begun = False

        def on_start(self, _: object) -> None:
            if not self.begun:
                self.begun = True
                telling = f"compiling {what} for this machine; later starts find it compiled"
                running.enter_context(told_if_slow(telling, after))

        def on_end(self, _: object) -> None:
            """Others may follow: the whole is over with the block."""

    with ExitStack() as running, event.install_listener("numba:compile", Compiling()):
        yield
