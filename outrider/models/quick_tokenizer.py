"""A tokenizer without `transformers`: its two libraries, `tokenizers` and `jinja2`, and what was noted of its names.

Does what generating needs (encode, decode, the chat template) as the full one does, which was tried when it was noted.
Whatever else is asked of it is answered by the full one, which is loaded then. What a user sets (`padding_side`, say)
is set there, and from then on the full one answers everything.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"
TEMPLATE = "chat_template"
_NOTED = (TEMPLATE, "all_special_ids", "bos_token_id", "eos_token_id")
_TAG = "\N{OBJECT REPLACEMENT CHARACTER}CONTINUE\N{OBJECT REPLACEMENT CHARACTER}"  # where a last message goes on
_SAID = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}]
_TRIED = ("Hello world", "  two  spaces\n\ttab", "Zürich 日本 🙂 don't 1234.", "<|im_start|>user\n<s>x</s>")


class QuickTokenizer:
    """Made from a folder that `note` wrote. `full` loads the tokenizer of `transformers`."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], full: Callable[[], Any]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / FILE))
        self._facts, self._load = facts, full
        self._changed = False

    @cached_property
    def _full(self) -> Any:
        return self._load()

    def __getattr__(self, name: str) -> Any:
        """Noted, or of the full tokenizer; called only for what this class has not."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._facts[name] if name in _NOTED and not self._changed else getattr(self._full, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._full, name, value)
            self._changed = True

    def __len__(self) -> int:
        return len(self._full) if self._changed else int(self._facts["length"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._full, memo)

    def __call__(self, text: Any, *more: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        options.pop("verbose", None)
        if self._changed or more or options or not isinstance(text, str):
            return self._full(text, *more, add_special_tokens=add_special_tokens, **options)
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def encode(self, text: Any, *more: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
        return list(self(text, *more, add_special_tokens=add_special_tokens, **options)["input_ids"])

    def decode(
        self, tokens: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None,
        **options: Any,
    ) -> str:  # fmt: skip
        if self._changed or clean_up_tokenization_spaces is not False or options or isinstance(tokens, int):
            return str(
                self._full.decode(
                    tokens, skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=clean_up_tokenization_spaces, **options,
                )
            )  # fmt: skip
        return str(self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        return dict(self._full.get_vocab() if self._changed else self._tokenizer.get_vocab(with_added_tokens=True))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if self._changed:
            return self._full.convert_tokens_to_ids(tokens)
        unknown = self._facts["unk_token_id"]
        ids = [
            unknown if (found := self._tokenizer.token_to_id(token)) is None else found
            for token in ([tokens] if isinstance(tokens, str) else tokens)
        ]
        return ids[0] if isinstance(tokens, str) else ids

    def convert_ids_to_tokens(self, ids: Any, **options: Any) -> Any:
        if self._changed or options:
            return self._full.convert_ids_to_tokens(ids, **options)
        single = not hasattr(ids, "__iter__")
        tokens = [self._tokenizer.id_to_token(int(each)) for each in ([ids] if single else ids)]
        return tokens[0] if single else tokens

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        known = {"add_generation_prompt", "tokenize", "return_dict", "continue_final_message"}
        foreign = self._changed or self._facts["foreign_template"]
        if foreign or set(options) - known or options.get("return_dict", True):
            return self._full.apply_chat_template(conversation, **options)
        begun = bool(options.get("continue_final_message"))
        text = self._rendered(conversation, bool(options.get("add_generation_prompt")), begun)
        return self(text, add_special_tokens=False)["input_ids"] if options.get("tokenize", True) else text

    def _rendered(self, conversation: Sequence[Mapping[str, Any]], answer: bool, begun: bool) -> str:
        messages = json.loads(json.dumps([dict(message) for message in conversation]))
        last = str(messages[-1].get("content") or "") if begun else ""
        if begun:
            messages[-1]["content"] = last + _TAG
        text: str = self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=answer, **self._facts["names"]
        )
        if not begun:
            return text
        if _TAG not in text or last.strip() not in text:
            raise ValueError("the last message does not appear in the text that the template makes")
        return text[: text.rindex(_TAG)]

    @cached_property
    def _template(self) -> Any:
        """In a sandbox: a template is a program that came with the model. The same names as `transformers` gives it."""
        from jinja2.exceptions import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def tojson(
            value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
        ) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                              sort_keys=sort_keys)  # fmt: skip

        rooms = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        rooms.filters["tojson"] = tojson
        rooms.globals["raise_exception"] = refuse
        rooms.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return rooms.from_string(self.chat_template or "")


def note(tokenizer: Any, folder: Path) -> dict[str, Any] | None:
    """Changes the folder. What a `QuickTokenizer` has to know; None where it would not do what `tokenizer` does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = getattr(tokenizer, TEMPLATE, None)
    if backend is None or not (template is None or isinstance(template, str)):
        return None
    (folder / FILE).write_text(backend.to_str(), encoding="utf-8")
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    facts: dict[str, Any] = {
        TEMPLATE: template, "names": names, "length": len(tokenizer),
        "all_special_ids": list(map(int, tokenizer.all_special_ids)), "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "unk_token_id": tokenizer.unk_token_id, "foreign_template": False,
    }  # fmt: skip
    try:
        quick = QuickTokenizer(folder, facts, lambda: tokenizer)
        same = all(_same(quick, tokenizer, text) for text in _TRIED)
        facts["foreign_template"] = template is not None and not _same_template(quick, tokenizer)
    except Exception:  # of a tokenizer with code of its own: the full one serves
        return None
    return facts if same else None


def _same(quick: QuickTokenizer, tokenizer: Any, text: str) -> bool:
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    ids = [list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (True, False)]
    mine = [quick(text, add_special_tokens=special)["input_ids"] for special in (True, False)]
    return mine == ids and all(quick.decode(each, **options) == tokenizer.decode(each, **options) for each in ids)


def _same_template(quick: QuickTokenizer, tokenizer: Any) -> bool:
    for messages, answer in ((_SAID[:1], True), (_SAID, False), ([*_SAID, _SAID[0]], True)):
        options = {"add_generation_prompt": answer, "tokenize": True, "return_dict": False}
        try:
            wanted = list(tokenizer.apply_chat_template(messages, **options))
            if quick.apply_chat_template(messages, **options) != wanted:
                return False
        except Exception:  # a template with demands or tags of its own
            return False
    return True
