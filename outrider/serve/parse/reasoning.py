"""Reasoning between <think> and </think>, apart from the answer, as Qwen, DeepSeek and others write it.

A template may open it already, so that the text begins inside. Only at the beginning of a text it counts as reasoning.
"""

from __future__ import annotations

from outrider.serve.parse.pieces import Parser, Piece, Said, held

OPEN, CLOSE = "<think>", "</think>"


class Reasoning:
    """Changes state. What is no reasoning goes to the next parser."""

    def __init__(self, then: Parser, begun: bool = False) -> None:
        self._then = then
        self._state = "inside" if begun else "before"
        self._buffer = ""
        self._trim = begun  # line ends behind <think> and </think> belong to neither

    def feed(self, text: str) -> list[Piece]:
        if self._state == "after" and not self._trim:
            return self._then.feed(text)
        self._buffer += text
        pieces: list[Piece] = []
        if self._state == "before":
            start = self._buffer.lstrip()
            if start.startswith(OPEN):
                self._buffer, self._state, self._trim = start[len(OPEN) :], "inside", True
            elif OPEN.startswith(start):
                return []  # not yet known
            else:
                self._state, self._trim = "after", False
                text, self._buffer = self._buffer, ""
                return self._then.feed(text)
        if self._state == "inside":
            self._drop_line_ends()
            said, marker, rest = self._buffer.partition(CLOSE)
            if marker:
                pieces += _reasoned(said.rstrip("\n"))
                self._buffer, self._state, self._trim = rest, "after", True
            else:
                certain = said[: len(said) - held(said, (CLOSE,))].rstrip("\n")  # line ends may stand before the end
                pieces += _reasoned(certain)
                self._buffer = said[len(certain) :]
        if self._state == "after":
            self._drop_line_ends()
            text, self._buffer = self._buffer, ""
            pieces += self._then.feed(text) if text else []
        return pieces

    def finish(self) -> list[Piece]:
        text, self._buffer = self._buffer, ""
        if self._state == "inside":
            return [*_reasoned(text), *self._then.finish()]
        return [*(self._then.feed(text) if text else []), *self._then.finish()]

    def _drop_line_ends(self) -> None:
        if self._trim:
            self._buffer = self._buffer.lstrip("\n")
            self._trim = not self._buffer


def _reasoned(text: str) -> list[Piece]:
    return [Said(text, "reasoning")] if text else []
