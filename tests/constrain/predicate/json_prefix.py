"""Whether a text may still become JSON, and whether it is: a predicate for tests, written without a grammar."""

from __future__ import annotations

import json
import re

STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*'
OPEN_STRING = re.compile(STRING + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
VALUE = re.compile(STRING + r'"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null')
OPEN_NUMBER = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*|(?:\.\d+)?[eE][+-]?\d*)?)?")
SPACE = re.compile(r"[ \n]?")
WORDS = ("true", "false", "null")


def viable(text: str) -> bool:
    """An object to come, or begun; at most one space between parts, so that it cannot wander for ever."""
    wants, stack, at = "object", [], 0
    while True:
        at = SPACE.match(text, at).end() if wants != "object" else at
        if at == len(text):
            return True
        here = text[at]
        if wants == "nothing":
            return False
        if wants in ("object", "value", "value or ]") and (here == "{" or (here == "[" and wants != "object")):
            stack.append(here)
            wants, at = ("key or }", at + 1) if here == "{" else ("value or ]", at + 1)
        elif here in "}]" and (wants.endswith(here) or wants == f", or {here}"):
            stack.pop()
            wants, at = (after(stack), at + 1)
        elif here == "," and wants.startswith(","):
            wants, at = ("key" if stack[-1] == "{" else "value"), at + 1
        elif here == ":" and wants == ":":
            wants, at = "value", at + 1
        elif wants.startswith(("key", "value")):
            found = VALUE.match(text, at)
            if wants.startswith("key") and here != '"':
                return False
            if begun(text[at:]):
                return True
            if found is None:
                return here == '"' and open_string(text, at)
            wants, at = (":" if wants.startswith("key") else after(stack)), found.end()
        else:
            return False


def after(stack: list[str]) -> str:
    return "nothing" if not stack else ", or }" if stack[-1] == "{" else ", or ]"


def open_string(text: str, at: int) -> bool:
    found = OPEN_STRING.match(text, at)
    return found is not None and found.end() == len(text)


def begun(rest: str) -> bool:
    number = OPEN_NUMBER.fullmatch(rest)
    return any(word.startswith(rest) for word in WORDS) or (number is not None and rest != "")


def complete(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
