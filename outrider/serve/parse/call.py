"""One call of a tool as JSON, read while it comes: {"name": ..., "arguments": {...}} in any order of its fields.

The text of the arguments is passed on as it stands, so that it streams. What is no such object says so with `failed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Changes state with every `feed`, which gives back what stands behind the object once it is complete."""

    def __init__(self, is_tool: Callable[[str], bool] = lambda name: True) -> None:
        self.name: str | None = None
        self.complete = False
        self.failed = False
        self._raw: list[str] = []
        self._is_tool = is_tool
        self._depth = 0
        self._in_string = self._escaped = False
        self._token: list[str] = []  # the text of the key or value that is read, at depth 1
        self._key: str | None = None
        self._expects_key = True
        self._ready: list[str] = []  # text of the arguments that nobody has taken yet
        self._any = False  # whether there were arguments

    @property
    def raw(self) -> str:
        """Everything that was read."""
        return "".join(self._raw)

    def take(self) -> str:
        """The text of the arguments that came since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def feed(self, text: str) -> str:
        for place, char in enumerate(text):
            self._raw.append(char)
            self._read(char)
            if self.complete or self.failed:
                return text[place + 1 :]
        return ""

    def _read(self, char: str) -> None:
        if self._depth == 0:
            if char == "{":
                self._depth = 1
            elif not char.isspace():
                self.failed = True
            return
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return
        if self._depth == 1 and char in ":,}":
            self._between(char)
            return
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _keep(self, char: str) -> None:
        if not self._token and char.isspace():
            return
        if self._key in ARGUMENTS and not self._expects_key and (self._token or [char])[0] != '"':
            self._ready.append(char)
            self._token = self._token or [char]  # the rest is on its way already
        else:
            self._token.append(char)

    def _between(self, char: str) -> None:
        if char == ":":
            self._key, self._token, self._expects_key = _text(self._token), [], False
            self.failed = self._key is None
            return
        if not self._expects_key:
            self._end_value()
        if char == "}":
            self._depth = 0
            self.complete = self.name is not None
            self.failed = self.failed or not self.complete
            if self.complete and not self._any:
                self._ready = ["{}"]
        self._key, self._token, self._expects_key = None, [], True

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _text(self._token)
            self.failed = self.name is None or not self._is_tool(self.name)
        elif self._key in ARGUMENTS:
            self._any = True
            if (inner := _text(self._token)) is not None:
                self._ready = [inner]
            while self._ready and self._ready[-1].isspace():
                self._ready.pop()


class ArgumentScanner:
    """The same where the name is known already and the object is the arguments. Changes state."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.complete = self.failed = False
        self._raw: list[str] = []
        self._taken = 0
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def take(self) -> str:
        text, self._taken = "".join(self._raw[self._taken :]), len(self._raw)
        return text

    def feed(self, text: str) -> str:
        for place, char in enumerate(text):
            self._raw.append(char)
            if self._in_string:
                self._in_string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
            self.failed = self._depth == 0 and len(self._raw) == 1
            self.complete = self._depth == 0 and not self.failed
            if self.complete or self.failed:
                return text[place + 1 :]
        return ""


def _text(token: list[str]) -> str | None:
    """The string that a JSON text holds; None where it holds none."""
    try:
        value = json.loads("".join(token))
    except ValueError:
        return None
    return value if isinstance(value, str) else None
