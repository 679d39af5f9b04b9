"""Prompt files: JSONL rows with `prompt`, `turns` (what a user says) or chat `messages`; and a small built-in set.

Reads and checks only: applying a chat template and answering earlier turns is the business of whoever generates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError

Message = dict[str, str]  # role and content

CHAT_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "chat")
)
GROUPS = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Either user turns, each answered before the next is asked, or one ready list of messages."""

    id: str
    turns: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    category: str = ""

    @property
    def group(self) -> str:
        """The eight chat categories count as one kind of work; others stand for themselves."""
        return "chat" if self.category in CHAT_CATEGORIES else self.category or "all"

    @property
    def rounds(self) -> int:
        """How many answers this prompt asks for."""
        return len(self.turns) or 1

    def conversation(self, answers: Sequence[str] = ()) -> list[Message]:
        """Messages up to the turn that follows these answers; ends with what is to be answered next."""
        if self.messages:
            return list(self.messages)
        past = [
            message
            for turn, answer in zip(self.turns, answers, strict=False)
            for message in ({"role": "user", "content": turn}, {"role": "assistant", "content": answer})
        ]
        return [*past, {"role": "user", "content": self.turns[len(answers)]}]

    def raw(self, answers: Sequence[str] = ()) -> str:
        """The same as plain text, for models without a chat template."""
        return "\n\n".join(message["content"] for message in self.conversation(answers))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, or all. An error names the file, the line and the remedy."""
    return _parse(read_text(path), str(path), limit)


def built_in_prompts(limit: int | None = None) -> list[Prompt]:
    """Our own prompts over all six groups, for the demo, the gate and the tests."""
    data = resources.files("outrider").joinpath("data/prompts.jsonl")
    return _parse(data.read_text(encoding="utf-8"), "the built-in prompts", limit)


def read_text(path: str | Path) -> str:
    """A whole UTF-8 file; every way it can fail is one line with the remedy."""
    try:
        return _decoded(Path(path).read_bytes(), str(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the path of an existing one") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; give the path of a file in it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def read_stdin() -> str:
    """All of standard input, as UTF-8 whatever the locale says."""
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{name}: line {line} is not UTF-8; save it with UTF-8 encoding") from None


def _parse(content: str, name: str, limit: int | None) -> list[Prompt]:
    if limit is not None and limit < 1:
        raise InputError(f"a limit of {limit} prompts leaves none; give 1 or more")
    prompts: list[Prompt] = []
    for number, line in enumerate(content.split("\n"), 1):  # splitlines() would also cut at U+2028, legal in JSON
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(_prompt(line, f"{name}: line {number}", number))
    if not prompts:
        raise InputError(f'{name}: holds no prompts; write one JSON object a line, such as {{"prompt": "Hello"}}')
    return prompts


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply or out of range"
        raise InputError(f"{where} is not JSON ({reason}); write one JSON object a line") from None
    if not isinstance(row, dict):
        raise InputError(f'{where} is not a JSON object; write it as {{"prompt": "..."}}')
    given = [key for key in ("prompt", "turns", "messages") if key in row]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InputError(f"{where} needs exactly one of prompt, turns and messages; it has {found}")
    return Prompt(
        id=str(row.get("id", row.get("question_id", number))),
        turns=_turns(row, where) if given[0] != "messages" else (),
        messages=_messages(row["messages"], where) if given[0] == "messages" else (),
        category=str(row.get("category") or ""),
    )


def _turns(row: dict[str, Any], where: str) -> tuple[str, ...]:
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        what = "prompt must be text that is not empty" if "prompt" in row else "turns must be a list of texts"
        raise InputError(f"{where}: {what}")
    return tuple(turns)


def _messages(messages: Any, where: str) -> tuple[Message, ...]:
    def good(m: Any) -> bool:
        return isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)

    if not isinstance(messages, list) or not messages or not all(map(good, messages)):
        raise InputError(f'{where}: messages must be a list of {{"role": "user", "content": "..."}}')
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)
