"""Calls of tools in the forms that chat templates teach: Qwen and Hermes, Llama, Mistral. They stream in pieces.

What turns out to be no call is the answer, markers and all: nothing that a model says is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from outrider.serve.parse.call import ArgumentScanner, CallScanner
from outrider.serve.parse.pieces import CallArguments, CallBegins, Piece, Said, first_of, held


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a model writes calls. `opens` begin them, `closes` end each, `between` may stand between two."""

    name: str
    opens: tuple[str, ...]
    closes: str = ""
    between: str = ""  # characters
    bare: bool = False  # a call may stand without a marker at the beginning of the text
    named: str = ""  # what stands between a name and its arguments, where the name is no JSON


FORMS = {
    "hermes": ToolForm("hermes", ("<tool_call>",), "</tool_call>"),
    "llama": ToolForm("llama", ("<|python_tag|>",), between=";", bare=True),
    "mistral": ToolForm("mistral", ("[TOOL_CALLS]",), between="],", named="[ARGS]"),
}


def form_of(template: str | None) -> ToolForm:
    """What a chat template teaches; Hermes' where it says nothing, which most models know."""
    text = template or ""
    if "[TOOL_CALLS]" in text:
        return FORMS["mistral"]
    if "<tool_call>" not in text and ("python_tag" in text or '"parameters"' in text):
        return FORMS["llama"]
    return FORMS["hermes"]


class Tools:
    """Changes state. `names` are the tools that were offered: a bare object counts as a call only with one of them."""

    def __init__(self, form: ToolForm, names: Collection[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._buffer = ""
        self._calls = 0
        self._state: Callable[[], list[Piece] | None] = self._at_start if form.bare else self._outside
        self._scanner: CallScanner | ArgumentScanner | None = None
        self._marker = ""
        self._begun = False  # whether the call that is read was told of

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while (more := self._state()) is not None:
            pieces += more
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back; a call that was cut off stays cut off."""
        pieces: list[Piece] = []
        if self._scanner is not None and not self._begun:
            pieces += _said(self._marker + self._scanner.raw)
        if self._state != self._after or self._buffer.strip(self._form.between + " \n"):
            pieces += _said(self._buffer)
        self._buffer, self._scanner, self._marker = "", None, ""
        return pieces

    # Each state reads from the buffer and gives pieces, or None where it must wait for more.

    def _at_start(self) -> list[Piece] | None:
        start = self._buffer.lstrip()
        if start.startswith("{"):
            self._marker, self._buffer = self._buffer[: len(self._buffer) - len(start)], start
            return self._enter(bare=True)
        if start:
            self._state = self._outside
            return []
        return None

    def _outside(self) -> list[Piece] | None:
        found = first_of(self._buffer, self._form.opens)
        if found is None:
            keep = held(self._buffer, self._form.opens)
            ready, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
            return _said(ready) or None
        at, marker = found
        before = self._buffer[:at]
        self._buffer, self._marker = self._buffer[at + len(marker) :], marker
        self._state = self._opened
        return _said(before.rstrip("\n") if self._calls else before)

    def _opened(self) -> list[Piece] | None:
        """Behind a marker: an object, or a name of a tool and then one."""
        start = self._buffer.lstrip(" \n[" if self._form.named else " \n")
        if not start:
            return None
        self._marker += self._buffer[: len(self._buffer) - len(start)]
        self._buffer = start
        if start[0] == "{" or not self._form.named:
            self._buffer = start
            return self._enter()
        name, marker, rest = start.partition(self._form.named)
        brace = name.find("{")
        if brace >= 0 and not marker:
            name, rest, marker = name[:brace], name[brace:], "{"
        if not marker:
            if len(name) > 256:
                return self._give_up()
            return None
        self._buffer = rest.lstrip()
        return self._enter(name=name.strip())

    def _enter(self, bare: bool = False, name: str | None = None) -> list[Piece]:
        known = self._names.__contains__ if bare else _anything
        self._scanner = CallScanner(known) if name is None else ArgumentScanner(name)
        self._begun, self._state = False, self._inside
        return []

    def _inside(self) -> list[Piece] | None:
        scanner = self._scanner
        assert scanner is not None
        rest = scanner.feed(self._buffer)
        self._buffer = ""
        if scanner.failed and not self._begun:
            self._buffer = rest
            return self._give_up()
        pieces: list[Piece] = []
        if scanner.name is not None and not self._begun:
            self._begun = True
            pieces.append(CallBegins(self._calls, scanner.name))
            self._calls += 1
        if text := scanner.take():
            pieces.append(CallArguments(self._calls - 1, text))
        if scanner.complete or scanner.failed:
            self._scanner, self._marker, self._buffer = None, "", rest
            self._state = self._after
        return pieces if pieces or self._state == self._after else None

    def _after(self) -> list[Piece] | None:
        """Behind a call: what closes it, then perhaps another one, or text."""
        start = self._buffer.lstrip(" \n" + self._form.between)
        if self._form.closes and self._form.closes.startswith(start) and start != self._form.closes:
            return None
        if self._form.closes and start.startswith(self._form.closes):
            start = start[len(self._form.closes) :].lstrip("\n")
        elif not start or any(marker.startswith(start) and marker != start for marker in self._form.opens):
            return None
        self._buffer = start
        if self._form.closes or not start.startswith("{"):
            self._state = self._outside
            return []
        return self._enter()

    def _give_up(self) -> list[Piece]:
        raw = self._marker + (self._scanner.raw if self._scanner is not None else "")
        self._scanner, self._marker, self._state = None, "", self._outside
        return _said(raw)


def parse_all(form: ToolForm, names: Sequence[str], text: str) -> list[Piece]:
    """A whole text at once."""
    parser = Tools(form, names)
    return [*parser.feed(text), *parser.finish()]


def _said(text: str) -> list[Piece]:
    return [Said(text)] if text else []


def _anything(name: str) -> bool:
    return True
