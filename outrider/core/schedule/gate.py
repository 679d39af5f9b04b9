"""One thread at a time steps an engine; the others wait, and find what its steps brought.

No thread steps when what it waits for is there already, so calls of several threads share their batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.core.errors import OutriderError


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: int | None = None  # the thread that steps

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside there is one thread; others wait until it has left."""
        self._enter(lambda: False)
        try:
            yield
        finally:
            self._leave()

    def until(self, reached: Callable[[], bool], step: Callable[[], object]) -> None:
        """Steps until that is reached, or waits while others do."""
        while self._enter(reached):
            try:
                step()
            finally:
                self._leave()

    def wake(self) -> None:
        """Something has changed that threads may wait for."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Until `wake` or a step brought it about; False where that took too long. Steps nothing."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not reached():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _enter(self, reached: Callable[[], bool]) -> bool:
        """Whether this thread is inside; it is not where that is reached."""
        me = threading.get_ident()
        if self._inside == me:
            raise OutriderError(
                "this engine was asked for results from within one of its steps; there only submit and cancel"
            )
        with self._changed:
            while not (done := reached()) and self._inside is not None:
                self._changed.wait()
            if not done:
                self._inside = me
        return not done

    def _leave(self) -> None:
        with self._changed:
            self._inside = None
            self._changed.notify_all()
