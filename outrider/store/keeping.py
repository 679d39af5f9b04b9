"""One memory file while an engine lives: what it held, what is taken from it, and what replaces it.

Knows drafters by their protocol only. Written whole or not at all, by `memory.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from outrider.core.errors import InputError
from outrider.core.protocols import Controller, Drafter
from outrider.store.memory import Arrays, collect, read_memory, recall, write_memory

log = logging.getLogger("outrider")
Parts = Iterable[Drafter | Controller | None]


class Keeping:
    """`path` None: nothing is there and nothing is kept, but for what is saved to another file by name."""

    def __init__(self, path: str | Path | None, model: str) -> None:
        self.path, self._model = Path(path) if path is not None else None, model
        self._arrays: Arrays = {}
        self.read()

    def read(self) -> None:
        """What the file holds now, whoever wrote it."""
        self._arrays = read_memory(self.path, self._model) if self.path else {}

    def recall(self, parts: Parts, kept: bool = True) -> None:
        """`kept`: theirs will be saved, so one in the file that they cannot go on from is refused, not replaced."""
        try:
            for part in parts:
                recall(part, self._arrays)
        except InputError as error:
            if kept:
                raise InputError(f"{self.path}: {error}") from error
            log.warning("%s: %s", self.path, error)

    def save(self, arrays: Arrays, path: str | Path | None = None) -> None:
        """Replaces a memory of this model, and no other file. Arrays of parts that are not there now stay."""
        where = Path(path) if path is not None else self.path
        if where is None:
            raise InputError("there is no file for the memory; give one here or to load(memory=...)")
        read_memory(where, self._model)
        self._arrays |= arrays
        write_memory(where, self._arrays, self._model)


def copied(parts: Parts) -> Arrays:
    """All that these parts would keep, to be written while they go on."""
    return {name: array.copy() for name, array in collect(parts).items()}
