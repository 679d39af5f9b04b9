"""SamplingParams: everything a caller may ask of the next-token distribution and of a text's end, checked once.

A value that cannot be used is refused here with `InputError`, so no other part checks parameters again. Token ids are
only known to be whole numbers here; whether they are in the vocabulary is checked when a sequence begins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TypedDict, Unpack

from outrider.core.errors import InputError, did_you_mean

FORMS = (
    "json_schema",
    "regex",
    "grammar",
    "choices",
    "structural_tag",
    "quote",
)  # parameters that a text's form is given by
MIN_TEMPERATURE = 1e-5  # below it float32 logits divided by the temperature carry no more than the argmax does


class SamplingArguments(TypedDict, total=False):
    """The keyword arguments of `generate`, `chat`, `stream` and `submit`: the fields of `SamplingParams`, with its
    defaults and units. `bad_words` and `prediction` may be texts where there is a tokenizer."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str | Sequence[int]]
    allowed_ids: Sequence[int]
    seed: int | None
    stop: str | Sequence[str]
    include_stop: bool
    skip_special: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_new_tokens: int
    max_new_tokens: int
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    prediction: str | Sequence[int]
    json_schema: str | Mapping[str, object] | bool
    regex: str
    grammar: str
    choices: Sequence[str]
    structural_tag: str | Mapping[str, object]
    quote: bool | str | Sequence[int | str]
    free_spacing: bool
    trace: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks for; the default is in brackets.

    temperature (0.0): divides the logits; 0 is greedy, the likeliest token each time.
    top_k (0): keep this many of the likeliest tokens; 0 keeps all.
    top_p (1.0): keep the likeliest tokens that together have this share of the probability, from 0 to 1; 1 keeps all.
    min_p (0.0): keep tokens with at least this share of the likeliest one's probability, from 0 to 1; 0 keeps all.
    repetition_penalty (1.0): factor on the logits of tokens in prompt and output; above 1 discourages them.
    presence_penalty (0.0): taken from the logits of tokens in the output, once.
    frequency_penalty (0.0): taken from the logits of tokens in the output, for each time they occur.
    logit_bias ({}): added to the logits, by token id; -inf bans a token.
    bad_words (()): sequences of token ids that must not be completed.
    allowed_ids (()): only these token ids may be said; empty: all.
    seed (None): from 0 to 2**64 - 1, the same one repeats a text; None takes a fresh one and reports it.
    stop (()): a string or several that end the text and are no part of it.
    include_stop (False): the stop string that ended the text is its last part.
    skip_special (True): special tokens are no part of the text.
    stop_token_ids (()): token ids that end the text.
    ignore_eos (False): go on past the model's end of text.
    min_new_tokens (0): tokens before which the text does not end.
    max_new_tokens (128): tokens after which it does.
    n (1): samples of each prompt.
    logprobs (None): report the log-probability (natural) of each token and of this many of the likeliest; None: none.
    prompt_logprobs (None): likewise of the prompt's tokens, of one sample; its prompt then runs whole.
    prediction (()): token ids the caller expects; a draft, which never changes the text.
    json_schema (''): the text is JSON that this schema (its JSON text, or a mapping) accepts.
    regex (''): the whole text matches this regular expression.
    grammar (''): the text follows this grammar, in EBNF (`root ::= ...`) or Lark (`start: ...`).
    choices (()): the text is one of these.
    structural_tag (''): where which form holds, as JSON in xgrammar's format: tool calls, reasoning before an answer.
    quote (False): the text is a stretch of the prompt, word for word; or, with two token ids (or their names), what
        stands between these two is.
    free_spacing (False): JSON may have any white space; without it separators are fixed, which drafts better.
    trace (False): keep a record of every step, to be shown or read; see `Generation.trace`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    json_schema: str = ""
    regex: str = ""
    grammar: str = ""
    choices: tuple[str, ...] = ()
    structural_tag: str = ""
    quote: bool | tuple[int, int] = False
    free_spacing: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        self._set("temperature", _real("temperature", self.temperature, "use 0 for greedy or a positive number"))
        if self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            remedy = f"use 0 for greedy or a number of at least {MIN_TEMPERATURE}"
            raise InputError(f"temperature={self.temperature}: {remedy}")
        self._set("top_k", _whole("top_k", self.top_k, 0, "use 0 to keep every token or a positive count"))
        remedy = "use a number above 0 and at most 1; 1 keeps every token"
        self._set("top_p", _real("top_p", self.top_p, remedy))
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: {remedy}")
        remedy = "use a number from 0 to below 1; 0 keeps every token"
        self._set("min_p", _real("min_p", self.min_p, remedy))
        if not 0 <= self.min_p < 1:
            raise InputError(f"min_p={self.min_p}: {remedy}")
        remedy = "use a number above 0; 1 is no penalty"
        self._set("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, remedy))
        if self.repetition_penalty <= 0:
            raise InputError(f"repetition_penalty={self.repetition_penalty}: {remedy}")
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _real(name, getattr(self, name), "use a finite number; 0 is no penalty"))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("bad_words", _bad_words(self.bad_words))
        if self.seed is not None:
            self._set("seed", _whole("seed", self.seed, 0, "use None for a fresh seed or a whole number from 0"))
            if self.seed >> 64:
                raise InputError(f"seed={self.seed}: use a seed below 2**64")
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("prediction", _ids("prediction", self.prediction))
        for name in ("ignore_eos", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r}: use True or False")
        self._set("min_new_tokens", _whole("min_new_tokens", self.min_new_tokens, 0, "use 0 for no minimum"))
        self._set("max_new_tokens", _whole("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token"))
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: "
                "lower the minimum or raise the maximum"
            )
        self._set("n", _whole("n", self.n, 1, "ask for at least one sample"))
        if self.logprobs is not None:
            remedy = "use None for none, 0 for the chosen token alone, or a positive count"
            self._set("logprobs", _whole("logprobs", self.logprobs, 0, remedy))
        if self.prompt_logprobs is not None:
            remedy = "use None for none, 0 for the prompt's tokens alone, or a positive count"
            self._set("prompt_logprobs", _whole("prompt_logprobs", self.prompt_logprobs, 0, remedy))
        for name in ("json_schema", "structural_tag"):
            self._set(name, _json(name, getattr(self, name)))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{name}={getattr(self, name)!r}: use a text")
        self._set("choices", _choices(self.choices))
        self._set("quote", _quote(self.quote))
        if not isinstance(self.free_spacing, bool):
            raise InputError(f"free_spacing={self.free_spacing!r}: use True or False")
        asked = [name for name in FORMS if getattr(self, name)]
        if len(asked) > 1:
            raise InputError(f"{' and '.join(asked)} were both given; a text has one form: leave out all but one")

    @property
    def form(self) -> str:
        """Which of `FORMS` the text is asked to have; empty: any."""
        return next((name for name in FORMS if getattr(self, name)), "")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def constrained(self) -> bool:
        """Whether the text's form is asked for."""
        return any(getattr(self, form) for form in FORMS)

    def with_(self, **changes: Unpack[SamplingArguments]) -> SamplingParams:
        """These parameters with some changed, checked again."""
        unknown = [name for name in changes if name not in self.__slots__]
        if unknown:
            hint = did_you_mean(unknown[0], self.__slots__)
            raise InputError(
                f"unknown sampling parameter {', '.join(unknown)}; {hint}known: {', '.join(self.__slots__)}"
            )
        return replace(self, **changes)  # type: ignore[arg-type]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _real(name: str, value: object, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InputError(f"{name}={value!r}: {remedy}")
    return float(value)


def _whole(name: str, value: object, least: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name}={value!r}: {remedy}")
    return int(value)


def _ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise InputError(f"{name}={values!r}: use a list of token ids")
    return tuple(_whole(f"token id in {name}", value, 0, "use whole numbers from 0") for value in values)


def _bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias={bias!r}: use a mapping from token id to number")
    ids = _ids("logit_bias", bias)
    for token, value in zip(ids, bias.values(), strict=True):
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value == math.inf:
            raise InputError(f"logit_bias[{token}]={value!r}: use a finite number, or -inf to ban the token")
    return {token: float(value) for token, value in zip(ids, bias.values(), strict=True)}


def _bad_words(words: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(words, str | bytes | bytearray) or not isinstance(words, Iterable):
        raise InputError(f"bad_words={words!r}: use a list of words, each a list of token ids")
    checked = tuple(_ids("bad_words", word) for word in words)
    if () in checked:
        raise InputError("bad_words holds an empty word: give every word at least one token id")
    return checked


def _stops(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Iterable):
        raise InputError(f"stop={stop!r}: use a string or a list of strings")
    checked = tuple(strings)
    for string in checked:
        if not isinstance(string, str) or not string:
            raise InputError(f"stop string {string!r}: use strings of at least one character")
    return checked


def _json(name: str, value: object) -> str:
    """The JSON text of a schema; one that is given as text is only looked at."""
    if value == "" and isinstance(value, str):
        return ""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):  # a class of pydantic
        value = value.model_json_schema()
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{name} is no JSON ({why}); give a JSON object, as a mapping or as text") from None
    if not isinstance(parsed, Mapping | bool):
        raise InputError(f"{name} is JSON, but no object; give a schema such as {{'type': 'object'}}")
    return text


def _quote(quote: object) -> bool | tuple[int, int]:
    if isinstance(quote, bool):
        return quote
    marks = _ids("quote", quote)
    if len(marks) != 2 or marks[0] == marks[1]:
        raise InputError(f"quote={quote!r}: use True, or two different tokens that begin and end a quote")
    return marks[0], marks[1]


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise InputError(f"choices={choices!r}: use a list of texts")
    checked = tuple(choices)
    for choice in checked:
        if not isinstance(choice, str) or not choice:
            raise InputError(f"choices holds {choice!r}: use texts of at least one character")
    return checked
