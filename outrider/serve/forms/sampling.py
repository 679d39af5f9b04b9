"""The fields that say how a text is drawn, common to the forms of OpenAI, with those people send to vLLM and llama.cpp.

`params` makes the engine's parameters of them. A field that is null takes the server's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.core.errors import InputError
from outrider.core.noise import fresh_seed
from outrider.core.params import SamplingParams
from outrider.serve.forms.base import Form, Part
from outrider.serve.text import Text

Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Count = Annotated[int, Field(ge=1, le=2**31)]
MAX_LIST = 1024  # stop ids, bad words, biases
MAX_TOP = 20  # likeliest tokens a place, as OpenAI has it
INNER = ("skip_special", "include_stop")  # parameters that are no field of a request by that name


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Prediction(Part):
    """What the caller expects; OpenAI's form."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = [part.get("text") for part in self.content]
        if not all(isinstance(part, str) for part in parts):
            raise InputError('prediction.content: give a text, or parts such as {"type": "text", "text": "..."}')
        return "".join(str(part) for part in parts)


class Asked(Part):
    """Of our own: what the answer should say besides."""

    origins: bool | None = None  # who brought each token
    trace: bool | None = None  # keep every step for /v1/outrider/trace/{id}


class Sampling(Form):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Count | None = None  # tokens of a piece at least
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None  # 0 and -1: all
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # llama.cpp's name of it
    logit_bias: dict[str, Number] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_LIST)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**64)] | None = None  # -1: a fresh one
    stop: str | Annotated[list[str], Field(max_length=MAX_LIST)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_LIST)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    prediction: Prediction | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None
    method: Annotated[str, Field(max_length=256)] | None = None
    outrider: Asked | None = None
    user: str | None = None
    # How the text must look: constraints, in OpenAI's, vLLM's and llama.cpp's words.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None  # SGLang's names
    ebnf: str | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Likeliest tokens to report with each; None: no report."""
        return None

    def params(
        self, text: Text, prompt_tokens: int, context: int, defaults: Mapping[str, Any], *,
        default_new: int | None = None, most_new: int | None = None,
    ) -> SamplingParams:  # fmt: skip
        """Refuses what the engine would refuse; the seed is always set, so that the request can go on elsewhere."""
        room = max(context - prompt_tokens, 1)
        new = min(self.wanted_tokens or default_new or room, room, most_new or room)
        if (self.min_tokens or 0) > new:
            raise InputError(f"min_tokens={self.min_tokens} is above the {new} tokens that the answer may have")
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty or self.repeat_penalty,
            "seed": None if self.seed == -1 else self.seed,
            "ignore_eos": self.ignore_eos,
            "min_new_tokens": self.min_tokens,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": None if self.logit_bias is None else _bias(self.logit_bias),
            "allowed_ids": self.allowed_token_ids,
            "include_stop": self.include_stop_str_in_output,
            "skip_special": self.skip_special_tokens,
            "n": self.n,
            "logprobs": self.wanted_logprobs,
            "prompt_logprobs": self.prompt_logprobs,
        }
        values = {"temperature": 1.0, **defaults, **{name: value for name, value in given.items() if value is not None}}
        values.setdefault("seed", fresh_seed())
        if self.bad_words:
            values["bad_words"] = text.bad_words(self.bad_words)
        if self.prediction is not None:
            values["prediction"] = text.encode(self.prediction.text(), special=False)
        return SamplingParams(**{**values, "max_new_tokens": new})


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    if len(given) > MAX_LIST:
        raise InputError(f"logit_bias names {len(given)} tokens; name at most {MAX_LIST}")
    bias = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 11):
            raise InputError(f"logit_bias names {token[:40]!r}, which is no token id; name whole numbers from 0")
        bias[int(token)] = value
    return bias
