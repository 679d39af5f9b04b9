"""What a form of a text may be at most, so that compiling it or following it cannot take minutes.

A library that compiles cannot be interrupted, so what would keep it busy is refused before it is asked. Sizes are
those of the source; repetitions are counted as they would stand written out, `(a{1,50}){1,50}` as 2,500.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from outrider.core.errors import InputError

SOURCE = 1 << 20  # bytes of a schema, grammar or expression, and of all choices together
NESTED = 100  # levels of a schema, and of brackets
REPEATED = 100_000  # times that something stands there, written out
AMBIGUOUS = 1_000  # the same where a repetition stands in a repetition: each text can then be cut in many ways
COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}|[*+?]")


def check(form: str, given: str | tuple[str, ...]) -> None:
    """Raise `InputError` for what is too large."""
    texts = (given,) if isinstance(given, str) else given
    size = sum(len(text.encode()) for text in texts)
    if size > SOURCE:
        raise InputError(f"{form} has {size / 2**20:.1f} MB; give at most {SOURCE >> 20} MB")
    if form in ("json_schema", "structural_tag"):
        for _ in _walk(form, json.loads(texts[0])):
            pass


def check_repetitions(form: str, given: str | tuple[str, ...]) -> None:
    """Raise `InputError` for expressions that a parser which keeps all readings of a text cannot follow."""
    if not isinstance(given, str):
        return
    if form == "regex":
        check_expression(form, given)
    elif form == "grammar":
        check_expression(form, re.sub(r'"(?:\\.|[^"\\\n])*"', "x", given))
    else:
        for key, value in _walk(form, json.loads(given)):
            if key in ("pattern", "regex") and isinstance(value, str):
                check_expression(f"{form}: pattern", value)


def check_expression(form: str, source: str) -> None:
    """Counts what brackets hold, from the inside out: a stack of (written out, repeated already)."""
    stack: list[tuple[int, bool]] = [(1, False)]
    last = (1, False)  # the atom that a repetition would follow
    i = 0
    while i < len(source):
        sign = source[i]
        if sign == "\\":
            last, i = (1, False), i + 2
            continue
        if sign == "[":  # a class of characters is one atom
            end = re.compile(r"\]").search(_masked(source), i + 2)
            i, last = (end.end() if end else len(source)), (1, False)
            continue
        if sign == "(":
            stack.append((1, False))
            if len(stack) > NESTED:
                raise InputError(f"{form} has more than {NESTED} brackets in each other; write it flatter")
        elif sign == ")" and len(stack) > 1:
            last = stack.pop()
        elif counted := COUNT.match(source, i):
            last = _times(form, last, counted)
            i = counted.end() - 1
        else:
            last = (1, False)
        stack[-1] = (max(stack[-1][0], last[0]), stack[-1][1] or last[1])
        i += 1


def _times(form: str, atom: tuple[int, bool], counted: re.Match[str]) -> tuple[int, bool]:
    bounds = [int(number) for number in counted.groups() if number]
    if not bounds:
        return atom[0], True  # *, + and ? loop: nothing is written out
    size = atom[0] * max(*bounds, 1)
    most = AMBIGUOUS if atom[1] else REPEATED
    if size > most:
        inside = " in each other" if atom[1] else ""
        raise InputError(
            f"{form} repeats something {size:,} times{inside}, at most {most:,} can be followed; ask for fewer"
        )
    return size, True


def _masked(source: str) -> str:
    return re.sub(r"\\.", "xx", source)


def _walk(form: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values, without recursion."""
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        if depth > NESTED:
            raise InputError(f"{form} is nested more than {NESTED} levels deep; write it flatter, with $defs")
        if isinstance(one, dict):
            yield from one.items()
            waiting += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list):
            waiting += [(inner, depth + 1) for inner in one]
