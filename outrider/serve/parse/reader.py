"""One sample's text to its pieces, with the parsers that a request asks for."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.parse.pieces import CallArguments, CallBegins, Parser, Piece, Plain, Said
from outrider.serve.parse.reasoning import OPEN, Reasoning
from outrider.serve.parse.tools import ToolForm, Tools

LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""

    @property
    def openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Parsed:
    """What a sample has said so far. Changes state with `add`."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, CallBegins):
            self.calls.append(Call(new_call_id(), piece.name))
        elif isinstance(piece, CallArguments):
            self.calls[piece.index].arguments += piece.text
        elif piece.kind == "reasoning":
            self.reasoning += piece.text
        else:
            self.content += piece.text


@dataclass(frozen=True, slots=True)
class Reading:
    """How the texts of a request are read; the same for all its samples."""

    form: ToolForm | None = None  # None: no tools were offered
    tools: tuple[str, ...] = ()
    reasoning: bool = True
    begun: bool = False  # the prompt ends with <think>
    hidden: tuple[str, ...] = ()  # special tokens that are shown for the markers' sake, and are no text

    def parser(self) -> Parser:
        inner: Parser = Tools(self.form, self.tools) if self.form is not None else Plain()
        outer = Reasoning(inner, self.begun) if self.reasoning else inner
        return _Without(outer, self.hidden) if self.hidden else outer


def opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(OPEN)


def shown_specials(form: ToolForm | None, specials: Sequence[str]) -> tuple[str, ...] | None:
    """None where the markers are common text; else the special tokens that are to be taken out again."""
    markers = () if form is None else (*form.opens, form.closes, form.named)
    return tuple(s for s in specials if s not in markers) if set(markers) & set(specials) else None


def new_call_id() -> str:
    """Nine letters, which Mistral's templates ask for."""
    return "".join(secrets.choice(LETTERS) for _ in range(9))


class _Without:
    """Special tokens come whole: one is never cut between two pieces."""

    def __init__(self, then: Parser, hidden: Sequence[str]) -> None:
        self._then, self._hidden = then, hidden

    def feed(self, text: str) -> list[Piece]:
        for special in self._hidden:
            text = text.replace(special, "")
        return self._then.feed(text) if text else []

    def finish(self) -> list[Piece]:
        return self._then.finish()


__all__ = ["Call", "CallArguments", "CallBegins", "Parsed", "Piece", "Reading", "Said"]
