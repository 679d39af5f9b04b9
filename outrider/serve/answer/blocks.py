"""An answer as a row of blocks (reasoning, text, calls), which is how Anthropic's and the responses form stream it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.serve.parse.pieces import CallArguments, CallBegins, Piece
from outrider.serve.parse.reader import Call, Parsed

Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    text: str = ""  # so far; of a call its arguments
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Change:
    action: Literal["open", "more", "close"]
    block: Block
    text: str = ""


@dataclass(slots=True)
class Blocks:
    """Changes state with `feed`. White space around calls is no block."""

    parsed: Parsed  # the pieces are in it already
    blocks: list[Block] = field(default_factory=list)
    _open: Block | None = None

    def feed(self, pieces: Sequence[Piece]) -> list[Change]:
        changes: list[Change] = []
        for piece in pieces:
            if isinstance(piece, CallBegins):
                changes += self._begin("call", self.parsed.calls[piece.index])
                continue
            kind: Kind = "call" if isinstance(piece, CallArguments) else piece.kind
            if kind != "call" and (self._open is None or self._open.kind != kind):
                if not piece.text.strip() and (self._open is not None or self.blocks):
                    continue
                changes += self._begin(kind)
            assert self._open is not None
            self._open.text += piece.text
            changes.append(Change("more", self._open, piece.text))
        return changes

    def finish(self) -> list[Change]:
        """There is one block at least."""
        opened = self._begin("content") if not self.blocks else []
        return [*opened, *self._end()]

    def _begin(self, kind: Kind, call: Call | None = None) -> list[Change]:
        closed = self._end()
        self._open = Block(len(self.blocks), kind, call=call)
        self.blocks.append(self._open)
        return [*closed, Change("open", self._open)]

    def _end(self) -> list[Change]:
        block, self._open = self._open, None
        return [] if block is None else [Change("close", block)]
