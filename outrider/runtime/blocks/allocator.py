"""Who gets which slot and how much of the cache: what `SlotTarget` asks, whatever way the cache stores texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Allocator(Protocol):
    """Slots in use with their committed texts. All methods but `length`, `tokens` and `fits` change state.

    What a fork or a cut keeps may be less than was asked for, where a cache cannot go back to any place.
    """

    @property
    def free_slots(self) -> int: ...
    def length(self, slot: int) -> int: ...  # committed tokens
    def tokens(self, slot: int) -> NDArray[np.int64]: ...  # a copy of them
    def acquire(self, tokens: NDArray[np.int64], salt: str) -> int | None:
        """A slot that holds as much of the beginning of these tokens as is found; None where all are in use.

        Found are texts, running or finished, that were acquired with tokens and with the same salt.
        """
        ...

    def fork(self, slot: int, length: int) -> int | None: ...  # one that holds the first tokens of another, likewise
    def release(self, slot: int) -> None: ...  # the text may be found until the room is wanted
    def forget(self) -> None: ...  # finished texts are not found any more; none may be in use
    def append(self, slot: int, tokens: NDArray[np.int64]) -> None: ...  # their rows are in the cache already
    def truncate(self, slot: int, length: int) -> None: ...  # to less than it holds
    def fits(self, reaches: Mapping[int, int]) -> bool: ...  # whether all these slots can have so many rows at once
    def reserve(self, reaches: Mapping[int, int]) -> None: ...  # so many rows, now; `CacheFull` where they do not fit
