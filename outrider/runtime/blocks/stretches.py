"""StretchSlots: every slot has a stretch of the cache for its text; what texts have in common is copied, not shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import CacheFull
from outrider.runtime.blocks.kept import KeptTexts
from outrider.runtime.blocks.texts import Text, nearest
from outrider.runtime.cache import StretchCache


class Beginnings(Protocol):
    """How much of the first `length` tokens can be had again from a cache of states, which cannot be cut anywhere."""

    def of_slot(self, slot: int, length: int) -> int: ...
    def of_copies(self, copies: Sequence[Any], length: int) -> int: ...  # as `rows_at` made them, from the start


class StretchSlots:
    def __init__(
        self,
        cache: StretchCache,
        slots: int,
        tokens: int,
        kept: KeptTexts | None = None,
        beginnings: Beginnings | None = None,  # None: all of a text can be had again
    ) -> None:
        """All slots in use together hold at most `tokens`, each as many as the longest; finished texts are `kept`."""
        self._cache, self._tokens, self._kept, self._beginnings = cache, tokens, kept, beginnings
        self._texts: dict[int, Text] = {}  # of the slots in use
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def length(self, slot: int) -> int:
        return len(self._texts[slot].tokens) if slot in self._texts else 0

    def acquire(self, tokens: NDArray[np.int64], salt: str) -> int | None:
        if not self._free:
            return None
        other, length = nearest(self._texts.items(), tokens, salt)
        copies, known = self._kept.find(tokens, salt) if self._kept is not None else ([], 0)
        if self._beginnings is not None:
            length = self._beginnings.of_slot(other, length) if length else 0
            known = self._beginnings.of_copies(copies, known)
        slot = self._free[0]
        if not self._holds({slot: max(length, known)}):
            length = known = 0
        if known > length and self._kept is not None:
            size, length = self._kept.size, known
            for place, rows in enumerate(copies[: -(-known // size)]):
                self._cache.put(slot, place * size, rows, min(size, known - place * size))
        elif length:
            self._cache.copy(other, slot, length)
        return self._begin(Text(salt, len(tokens) > 0), tokens[:length])

    def fork(self, slot: int, length: int) -> int | None:
        if not self._free:
            return None
        source = self._texts[slot]
        self.reserve({self._free[0]: length})
        length = self._had(slot, length)
        self._cache.copy(slot, self._free[0], length)
        return self._begin(Text(source.salt, source.findable), source.array(length))

    def _begin(self, text: Text, tokens: NDArray[np.int64]) -> int:
        slot = self._free.pop(0)
        text.tokens.frombytes(tokens.tobytes())
        self._texts[slot] = text
        return slot

    def release(self, slot: int) -> None:
        text = self._texts.pop(slot)
        if text.findable and self._kept is not None:
            self._kept.add(text.array(), text.salt, lambda begin, end: self._cache.rows_at(slot, begin, end))
        self._cache.wipe(slot)
        self._free.append(slot)
        self._free.sort()

    def forget(self) -> None:
        if self._kept is not None:
            self._kept.forget()

    def append(self, slot: int, tokens: NDArray[np.int64]) -> None:
        self._texts[slot].tokens.frombytes(tokens.tobytes())

    def truncate(self, slot: int, length: int) -> None:
        length = self._had(slot, length)
        self._cache.cut(slot, length)
        del self._texts[slot].tokens[length:]

    def tokens(self, slot: int) -> NDArray[np.int64]:
        return self._texts[slot].array()

    def _had(self, slot: int, length: int) -> int:
        return length if self._beginnings is None else self._beginnings.of_slot(slot, length)

    def fits(self, reaches: Mapping[int, int]) -> bool:
        return self._holds(reaches)

    def reserve(self, reaches: Mapping[int, int]) -> None:
        """Nothing is set aside."""
        if not self._holds(reaches):
            raise CacheFull(
                f"the cache holds {self._tokens} tokens, {len(self._texts.keys() | reaches.keys())} sequences as long "
                f"as the longest, of {max(reaches.values())}, are more; raise cache_bytes, or run fewer at once"
            )

    def _holds(self, reaches: Mapping[int, int]) -> bool:
        longest = max([*reaches.values(), *(len(text.tokens) for text in self._texts.values())], default=0)
        return longest * len(self._texts.keys() | reaches.keys()) <= self._tokens
