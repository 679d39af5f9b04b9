"""What parsers give: pieces of the answer, of reasoning, and of calls; how to hold back what may become a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Said:
    text: str
    kind: Literal["content", "reasoning"] = "content"


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool, the `index`-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of its arguments."""

    index: int
    text: str


Piece = Said | CallBegins | CallArguments


class Parser(Protocol):
    """Changes state. All pieces of `feed` and `finish` together carry everything that was fed but markers."""

    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def held(text: str, markers: Sequence[str]) -> int:
    """Length of the longest ending that begins a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The marker that stands first in the text, and where."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None, key=lambda pair: (pair[0], -len(pair[1])))


class Plain:
    """Everything is the answer."""

    def feed(self, text: str) -> list[Piece]:
        return [Said(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
