"""Text at the front: token ids of prompts and conversations, and what single tokens look like. Needs no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from outrider.core.errors import InputError
from outrider.core.inputs import checked_text
from outrider.models import encoding

LONG = 20_000  # characters that take so long to encode that others should not wait for it
RESERVED = {
    "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors", "conversation",
    "chat_template", "tools", "documents", "padding", "truncation", "max_length", "tokenizer_kwargs", "messages",
    "return_assistant_tokens_mask",
}  # fmt: skip


class Text:
    """A tokenizer and its chat template; changes no state."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer(checked_text(text, "the text"), add_special_tokens=special)["input_ids"])

    def decode(self, ids: Sequence[int], special: bool = True) -> str:
        """`special`: special tokens are shown."""
        if any(token >= self.size for token in ids):
            raise InputError(f"token ids go from 0 to {self.size - 1} in this model")
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def size(self) -> int:
        return len(self.tokenizer)

    @cached_property
    def specials(self) -> tuple[str, ...]:
        """Special tokens, longest first."""
        return tuple(sorted(map(str, self.tokenizer.all_special_tokens), key=len, reverse=True))

    @property
    def template(self) -> str | None:
        made = getattr(self.tokenizer, "chat_template", None)
        return made if isinstance(made, str) else None

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        go_on: bool = False, answer: bool = True, **template: Any,
    ) -> str:  # fmt: skip
        """A conversation as the model reads it, up to where its answer begins; `go_on`: in the last message."""
        if wrong := RESERVED & set(template):
            raise InputError(f"chat_template_kwargs: {sorted(wrong)[0]} is not for the template; leave it out")
        more = dict(template, continue_final_message=True) if go_on else dict(template, add_generation_prompt=answer)
        if tools:
            more["tools"] = [dict(tool) for tool in tools]
        return str(encoding.render_chat(self.tokenizer, self.name, messages, tokenize=False, **more))

    def chat(self, *args: Any, **kwargs: Any) -> list[int]:
        return self.encode(self.chat_text(*args, **kwargs), special=False)

    def bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """At the beginning of a text and after a space, which are different tokens."""
        if not all(words):
            raise InputError("bad_words: one is empty; give at least one character each")
        return [tuple(self.encode(form, special=False)) for word in words for form in (word, " " + word.lstrip())]

    def piece(self, token: int) -> tuple[str, list[int]]:
        """One token as text, and as bytes: part of a character shows as U+FFFD, its bytes tell which."""
        name = self.tokenizer.convert_ids_to_tokens(token) if token < self.size else None
        if name is None:
            return "", []
        name = str(name)
        if len(name) == 6 and name.startswith("<0x"):
            raw = bytes([int(name[3:5], 16)])
        elif self._byte_level and all(char in self._bytes for char in name):
            raw = bytes(self._bytes[char] for char in name)
        else:
            raw = self.tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()
        return raw.decode("utf-8", "replace"), list(raw)

    @cached_property
    def _byte_level(self) -> bool:
        """Whether the vocabulary writes bytes as letters, as GPT-2's does: a space is one there."""
        return any("\u0120" in token for token in list(self.tokenizer.get_vocab())[:5000])

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The byte of each letter of such a vocabulary."""
        plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
        letters = {chr(byte): byte for byte in plain}
        others = [byte for byte in range(256) if byte not in set(plain)]
        return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
