"""What a caller may hand in as a prompt: a text, token ids or chat messages. Read once, refused by name.

Knows no tokenizer and no chat template: what comes out is what those can take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from outrider.core.errors import InputError

Message = Mapping[str, Any]  # role and content: a text, or a list of {"type": "text", "text": ...}
Prompt = str | Sequence[int] | Sequence[Message]

KINDS = "give a text, token ids or a list of chat messages"
EXAMPLE = '{"role": "user", "content": "..."}'
LONGEST = 40  # characters of a bad value that a message shows


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = items_of(prompts)
    if not items:
        raise InputError("there are no prompts; give at least one")
    if isinstance(items[0], Mapping) or _is_number(items[0]):
        return [items]
    return items


def items_of(prompt: object) -> list[Any]:
    """What a prompt that is no text consists of: token ids, or messages, or several prompts."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InputError(f"the prompt is {_shown(prompt)}, which is bytes; decode them: prompt.decode('utf-8')")
    if hasattr(prompt, "tolist"):  # arrays and tensors
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
        raise InputError(f"cannot use {_shown(prompt)} as a prompt; {KINDS}")
    return list(prompt)


def token_ids(items: Sequence[Any]) -> list[int]:
    """Whole numbers as they are; everything else is refused, never rounded."""
    for place, item in enumerate(items, 1):
        if not _is_number(item):
            raise InputError(f"item {place} of the prompt is {_shown(item)}, which is no token id; {KINDS}")
    return [index(item) for item in items]


def checked_text(text: str, what: str) -> str:
    """The text, if it can be written as UTF-8, which is what tokenizers read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise InputError(
            f"{what} has half a surrogate pair ({half}) at character {error.start + 1}; mend it: "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None
    return text


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with plain text as content, which every chat template reads; parts of text are joined by line ends."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InputError(f"cannot use {_shown(messages)} as chat messages; give a list such as [{EXAMPLE}]")
    checked = [_message(message, f"chat message {number}") for number, message in enumerate(messages, 1)]
    if not checked:
        raise InputError("there are no chat messages; give at least one")
    return checked


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{name} is {_shown(message)}; write it as {EXAMPLE}")
    if not isinstance(message.get("role"), str):
        raise InputError(f"{name} has no role; write it as {EXAMPLE}")
    content = message.get("content")
    if content is None:
        if message.get("tool_calls"):  # an assistant that calls a tool may say nothing besides
            return dict(message)
        raise InputError(f"{name} has no content; write it as {EXAMPLE}")
    return {**message, "content": _content(content, name)}


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        return checked_text(content, name)
    if not isinstance(content, list | tuple) or not content:
        raise InputError(f'{name} has {_shown(content)} as content; give a text or [{{"type": "text", "text": "..."}}]')
    return "\n".join(_part(part, f"part {number} of {name}") for number, part in enumerate(content, 1))


def _part(part: object, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise InputError(f"{name} is of type {kind!r}, but only text is read; leave the part out")
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise InputError(f'{name} is {_shown(part)}; write it as {{"type": "text", "text": "..."}}')
    return checked_text(text, name)


def _is_number(item: object) -> bool:
    """Whether it can be a token id: a whole number of Python, numpy or torch."""
    if isinstance(item, bool) or getattr(item, "shape", None):
        return False
    try:
        index(item)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _shown(value: object) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({type(value).__name__})"
