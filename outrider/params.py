"""SamplingParams: everything a caller may ask of the next-token law and of where a text ends, checked once.

A value that cannot be used is refused here with `InputError`, so no other part checks parameters again. Token ids are
only known to be whole numbers here; whether they are in the vocabulary is checked when a sequence begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from outrider.errors import InputError

COLDEST = 1e-5  # below it float32 logits divided by the temperature carry no more than the argmax does


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # prompt and output
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # -inf bans
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that must not be completed
    seed: int | None = None  # None: a fresh one, reported with the result
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    n: int = 1  # samples a prompt
    logprobs: int | None = None  # how many top alternatives to report beside the chosen token
    prediction: tuple[int, ...] = ()  # the output the caller expects, as ids: a draft, it never changes the text

    def __post_init__(self) -> None:
        self._set("temperature", _real("temperature", self.temperature, "use 0 for greedy or a positive number"))
        if self.temperature < 0 or 0 < self.temperature < COLDEST:
            raise InputError(f"temperature={self.temperature}: use 0 for greedy or a number of at least {COLDEST}")
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
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos={self.ignore_eos!r}: use True or False")
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_(self, **changes: Any) -> SamplingParams:
        """These parameters with some changed, checked again."""
        try:
            return replace(self, **changes)
        except TypeError:
            unknown = sorted(set(changes) - set(self.__slots__))
            if not unknown:
                raise
            raise InputError(
                f"unknown sampling parameter {unknown[0]!r}: use one of {', '.join(self.__slots__)}"
            ) from None

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
    if isinstance(values, str) or not isinstance(values, Iterable):
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
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise InputError(f"bad_words={words!r}: use a list of token id lists")
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
