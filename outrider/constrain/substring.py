"""Only what occurs in a corpus may be said: every output is a stretch of one of its documents.

Exact for the distribution of the model under that mask, token by token (arXiv 2204.10628); the corpus is anything that
narrows the places of a text by a token, such as an FM-index. The text may end behind any of its tokens. Cost: a few
counts a token, and a listing of what follows for each row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError

KEPT = 512  # states whose masks are remembered


class Occurrences(Protocol):
    """Where a text stands in a corpus, as a value."""

    @property
    def everything(self) -> Hashable: ...  # of the empty text
    def narrow(self, state: Any, token: int) -> Any | None: ...  # where it goes on with the token; None: nowhere
    def following(self, state: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...  # ids, and how often


@dataclass(frozen=True, slots=True)
class Substring:
    """A `protocols.Automaton`; a state is what the corpus says, and whether anything was said."""

    corpus: Occurrences
    vocab_size: int
    _rows: dict[Hashable, NDArray[np.int32]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ids, _ = self.corpus.following(self.corpus.everything)
        if not len(ids):
            raise InputError("the corpus of a quotation is empty; give a store with text in it")
        if ids[-1] >= self.vocab_size:
            raise InputError(f"the corpus has token id {ids[-1]}, the model {self.vocab_size}: use its tokenizer")

    def start(self, prompt: Sequence[int]) -> tuple[Any, bool]:
        return self.corpus.everything, False

    def advance(self, state: tuple[Any, bool], token: int) -> tuple[Any, bool] | None:
        found = self.corpus.narrow(state[0], int(token))
        return None if found is None else (found, True)

    def mask(self, states: Sequence[tuple[Any, bool]]) -> NDArray[np.int32]:
        return np.stack([self._row(state[0]) for state in states])

    def allows(self, state: tuple[Any, bool], token: int) -> bool:
        return self.corpus.narrow(state[0], int(token)) is not None

    def forced(self, state: tuple[Any, bool]) -> Sequence[int]:
        """Nothing: the text may end anywhere."""
        return ()

    def complete(self, state: tuple[Any, bool]) -> bool:
        return state[1]

    def _row(self, where: Any) -> NDArray[np.int32]:
        if where not in self._rows:
            if len(self._rows) >= KEPT:
                self._rows.pop(next(iter(self._rows)))
            bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
            bits[self.corpus.following(where)[0]] = 1
            self._rows[where] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._rows[where]
