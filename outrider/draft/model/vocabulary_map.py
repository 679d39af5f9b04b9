"""From the tokens of one vocabulary to those of another, through the bytes that both spell.

A draft token stands for the target token with the same bytes, or else for the target tokens that spell its bytes: as
the target's tokenizer spells them where it was asked, longest first elsewhere. Special tokens stand for nothing. Cost:
made once, a dictionary entry a token; one encoding for each token that is asked about.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.tree import NOTHING

Encode = Callable[[bytes], list[int]]


class Vocabulary(Protocol):
    """A tokenizer seen as bytes."""

    @property
    def pieces(self) -> Sequence[bytes]: ...  # per id; empty for special tokens and ids without a token
    @property
    def names(self) -> dict[str, int]: ...  # special tokens
    @property
    def start(self) -> tuple[int, ...]: ...  # ids in front of every text
    def encode(self, text: bytes, first: bool = False) -> list[int]: ...  # `first`: the text begins here


BYTES = [bytes([byte]) for byte in range(256)]  # the vocabulary of single bytes


def characters(size: int) -> list[bytes]:
    """Pieces for a model without a tokenizer: every id is a character of its own, so that text is a list of ids."""
    surrogates = range(0xD800, 0xE000)
    codes = (i + 1 if i + 1 < surrogates.start else i + 1 + len(surrogates) for i in range(size))
    return [chr(code).encode() for code in codes]


class VocabularyMap:
    """`first` changes as tokens are settled; the rest stays."""

    def __init__(self, target: Sequence[bytes], draft: Sequence[bytes], encode: Encode | None = None) -> None:
        """`encode`: the target's tokenizer, for a text that begins anywhere."""
        self.target, self.draft, self._encode = target, draft, encode
        # Of equal pieces the later id counts: byte-fallback tokens come before the ordinary ones of the same byte.
        self._ids = {piece: i for i, piece in enumerate(target) if piece}
        self._longest = max(map(len, self._ids), default=0)
        self._sorted: list[bytes] = sorted(self._ids)
        self._spelled: dict[int, tuple[int, ...]] = {}
        self.first: NDArray[np.int64] = np.full(len(draft), NOTHING)  # target token that each draft token begins with
        for i, piece in enumerate(draft):
            self.first[i] = self._beginning(piece)
        same = set(self._ids).intersection(draft)
        self.direct = frozenset(self._ids[piece] for piece in same)  # target tokens that one draft token spells

    def token(self, piece: bytes) -> int:
        """The target token with these bytes, or NOTHING."""
        return self._ids.get(piece, NOTHING)

    def goes_on(self, piece: bytes) -> bool:
        """Whether a longer target token begins with these bytes."""
        after = bisect_right(self._sorted, piece)
        return after < len(self._sorted) and self._sorted[after].startswith(piece)

    def spelled(self, token: int) -> tuple[int, ...]:
        """The target tokens with the bytes of this draft token; none where they cannot be spelled to the end."""
        if token not in self._spelled:
            self._spelled[token] = spelled = self._spell(self.draft[token])
            self.first[token] = spelled[0] if spelled else NOTHING
        return self._spelled[token]

    def _spell(self, piece: bytes) -> tuple[int, ...]:
        if piece in self._ids:
            return (self._ids[piece],)
        if self._encode is not None and piece:
            ids = self._encode(piece)
            if b"".join(self.target[i] for i in ids) == piece:
                return tuple(ids)
        out = []
        while piece:
            token = self._beginning(piece)
            if token == NOTHING:
                return ()
            out.append(token)
            piece = piece[len(self.target[token]) :]
        return tuple(out)

    def _beginning(self, piece: bytes) -> int:
        for length in range(min(len(piece), self._longest), 0, -1):
            if (token := self._ids.get(piece[:length])) is not None:
                return token
        return NOTHING


def fingerprint(target: Sequence[bytes], draft: Sequence[bytes]) -> int:
    """A number for this pair of vocabularies: what was learnt for one means nothing for another."""
    seen = 0
    for pieces in (target, draft):
        seen = zlib.crc32(len(pieces).to_bytes(8, "little"), seen)
        for piece in pieces:
            seen = zlib.crc32(piece + b"\0", seen)
    return seen
