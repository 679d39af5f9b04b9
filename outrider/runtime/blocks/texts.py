"""Texts: the committed tokens of every slot in use, and which of them begin as a new text does."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.blocks.prefixes import WIDTH, common


@dataclass(slots=True)
class Text:
    salt: str = ""
    findable: bool = False  # by texts to come; what nobody will ask for is not kept
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def array(self, length: int | None = None) -> NDArray[np.int64]:
        """A copy, of the first `length` tokens."""
        return np.array(self.tokens[:length], dtype=np.int64)


def as_tokens(tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(tokens, dtype=np.int64)


def nearest(texts: Iterable[tuple[int, Text]], tokens: NDArray[np.int64], salt: str) -> tuple[int, int]:
    """The slot whose text has most of its beginning in common with these tokens, and how many; -1 and 0: none."""
    whole, best, most = tokens.tobytes(), -1, 0
    for slot, text in texts:
        if text.findable and text.salt == salt and len(text.tokens):
            count = common(text.tokens.tobytes(), whole)
            if count > most:
                best, most = slot, count
    return best, most // WIDTH
