"""Stream: the text of one request piece by piece, for whoever iterates over it."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.core.engine import Handle
from outrider.core.generation import Generation


class Stream:
    """Iterates over pieces of text; stopping early cancels the request."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._pieces = handle.pieces()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    @property
    def generation(self) -> Generation:
        """Everything emitted so far; complete once the iteration has ended."""
        return self.handle.partial()[0]
