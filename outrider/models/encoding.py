"""What a caller hands in as text, to token ids with a loaded model's tokenizer and chat template.

Prompts, chat messages, predictions and bad words; what cannot be encoded is refused by name. Decodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.core.errors import InputError
from outrider.core.inputs import Message, Prompt, checked_messages, checked_text, items_of, token_ids
from outrider.core.params import SamplingArguments, SamplingParams
from outrider.models.load import LoadedModel


def tokenizer_of(loaded: LoadedModel) -> Any:
    if loaded.tokenizer is None:
        raise InputError("this model has no tokenizer; give token ids, or load it with tokenizer=...")
    return loaded.tokenizer


def encode(loaded: LoadedModel, prompt: Prompt) -> list[int]:
    """Token ids of a text, of chat messages (through the chat template), or of ids as they are."""
    if isinstance(prompt, str):
        if not prompt:
            raise InputError("the prompt is empty; give at least one character")
        return list(tokenizer_of(loaded)(checked_text(prompt, "the prompt"))["input_ids"])
    items = items_of(prompt)
    return encode_chat(loaded, items) if items and isinstance(items[0], Mapping) else token_ids(items)


def encode_chat(
    loaded: LoadedModel, messages: str | Sequence[Message], continue_final_message: bool = False
) -> list[int]:
    """Token ids of chat messages through the chat template, up to where the answer begins; a text is one message.

    `continue_final_message`: the last message is an answer that has begun; up to where it goes on.
    """
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if continue_final_message and (not turns or turns[-1].get("role") != "assistant"):
        raise InputError("continue_final_message: the last message is no assistant's; end with an answer that began")
    begun = {"continue_final_message": True} if continue_final_message else {"add_generation_prompt": True}
    return list(render_chat(tokenizer_of(loaded), loaded.name, turns, tokenize=True, **begun))


def render_chat(tokenizer: Any, name: str, messages: Sequence[Message], **template: Any) -> Any:
    """Chat messages through the template of a tokenizer: token ids, or the text with `tokenize=False`."""
    checked = checked_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{name} has no chat template; give a plain prompt instead")
    try:
        return tokenizer.apply_chat_template(checked, return_dict=False, **template)
    except Exception as error:  # a template is a program with demands of its own, and fails in its own way
        why = " ".join(str(error).split())
        raise InputError(
            f"the chat template of {name} refuses these messages ({why}); check roles and their order"
        ) from error


def sampling_params(
    loaded: LoadedModel, params: SamplingParams | None, sampling: SamplingArguments
) -> SamplingParams:  # fmt: skip
    """Keyword arguments change `params`, or the defaults; bad words and the prediction may be given as text."""
    if params is not None and not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise InputError(
            f"params is of type {kind}; give SamplingParams(...), or what they hold as keyword arguments "
            "(a list of them, one for each prompt, goes to generate)"
        )
    given = sampling.copy()
    expected, words = given.get("prediction"), given.get("bad_words")
    if isinstance(expected, str):
        given["prediction"] = _text_ids(loaded, expected, "the prediction")
    if isinstance(words, Iterable) and not isinstance(words, str | bytes):
        given["bad_words"] = _bad_words(loaded, words)
    if isinstance(given.get("quote"), str | list | tuple):
        given["quote"] = _marks(loaded, given["quote"])
    return (params or SamplingParams()).with_(**given)


def _marks(loaded: LoadedModel, quote: Any) -> list[int]:
    """The ids of the tokens that begin and end a quote, from their names; "<open> <close>" will do."""
    ids = []
    for mark in quote.split() if isinstance(quote, str) else quote:
        found = tokenizer_of(loaded).get_vocab().get(mark) if isinstance(mark, str) else mark
        if found is None:
            raise InputError(f"quote names {mark!r}, which is no token of {loaded.name}; use one, or its id")
        ids.append(found)
    return ids


def _text_ids(loaded: LoadedModel, text: str, what: str) -> tuple[int, ...]:
    return tuple(tokenizer_of(loaded)(checked_text(text, what), add_special_tokens=False)["input_ids"])


def _bad_words(loaded: LoadedModel, words: Iterable[str | Sequence[int]]) -> tuple[Sequence[int], ...]:
    """A word given as text is banned at the start of a text and after a space, which are different tokens."""
    out: list[Sequence[int]] = []
    for word in words:
        if isinstance(word, str):
            out += [_text_ids(loaded, form, "a bad word") for form in (word, " " + word.lstrip())]
        else:
            out.append(word)
    return tuple(out)
