"""A vocabulary of all bytes and a few longer pieces, small enough to be walked through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGER = (b'{"', b'":', b'": ', b'", "', b"name", b"age", b"true", b"12", b"ab", b"tool_call", b'"}')


@dataclass(frozen=True)
class ByteWords:
    """Id 0 is no text; ids 1 to 256 are the bytes; then longer pieces. `encode` takes the longest piece each time."""

    pieces: Sequence[bytes] = (b"", *(bytes([byte]) for byte in range(256)), *LONGER)

    def encode(self, text: bytes, first: bool = False) -> list[int]:
        ids = []
        while text:
            best = max((p for p in self.pieces if p and text.startswith(p)), key=len)
            ids.append(self.pieces.index(best))
            text = text[len(best) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


WORDS = ByteWords()
SIZE = len(WORDS.pieces)
