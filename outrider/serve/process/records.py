"""The records of the seam as plain JSON values, and back: short for what comes with every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from outrider.core import errors
from outrider.core.errors import OutriderError
from outrider.core.generation import FinishReason, Origin, TokenLogprob
from outrider.core.params import SamplingParams
from outrider.serve.link.seam import Delta, End, Event, Info, PromptReport, Request

DEFAULTS = SamplingParams()


def pack_request(request: Request) -> dict[str, Any]:
    """Only what differs from the defaults."""
    packed = {field.name: getattr(request, field.name) for field in fields(Request)}
    packed["params"] = {
        field.name: list(value.items()) if isinstance(value, Mapping) else value  # JSON has no whole numbers as keys
        for field in fields(SamplingParams)
        if (value := getattr(request.params, field.name)) != getattr(DEFAULTS, field.name)
    }
    return packed


def unpack_request(packed: Mapping[str, Any]) -> Request:
    given = dict(packed)
    params: dict[str, Any] = {
        name: dict(value) if isinstance(getattr(DEFAULTS, name), Mapping) else value
        for name, value in given.pop("params").items()
    }
    lists: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("prompt", "resume")}
    return Request(**given, **lists, params=SamplingParams(**params))


def pack_event(event: Event) -> list[Any]:
    if isinstance(event, Delta):
        logprobs = None if event.logprobs is None else [_pack_logprob(one) for one in event.logprobs]
        return ["d", event.sample, event.tokens, event.text, event.origins, logprobs, event.steps]
    if isinstance(event, End):
        return ["e", {field.name: getattr(event, field.name) for field in fields(End)}]
    return ["p", [None if one is None else _pack_logprob(one) for one in event.logprobs]]


def unpack_event(packed: list[Any]) -> Event:
    kind = packed[0]
    if kind == "d":
        _, sample, tokens, text, origins, logprobs, steps = packed
        return Delta(
            sample, tuple(tokens), text, tuple([Origin(drafter, depth) for drafter, depth in origins]),
            None if logprobs is None else tuple(map(_unpack_logprob, logprobs)), steps,
        )  # fmt: skip
    if kind == "e":
        return End(**{**packed[1], "finish": FinishReason(packed[1]["finish"])})
    return PromptReport(tuple(None if one is None else _unpack_logprob(one) for one in packed[1]))


def pack_info(info: Info) -> dict[str, Any]:
    return asdict(info)


def unpack_info(packed: Mapping[str, Any]) -> Info:
    made = Info(**packed)
    return replace(made, methods=tuple(made.methods), eos_ids=tuple(made.eos_ids), corpora=tuple(made.corpora))


def pack_error(error: BaseException) -> list[str]:
    return [type(error).__name__, " ".join(str(error).split()) or type(error).__name__]


def unpack_error(packed: list[str]) -> OutriderError:
    """Of the class that it had, where that is one of ours."""
    name, message = packed
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, OutriderError):
        return kind(message)
    return OutriderError(f"the engine failed: {name}: {message}")


def _pack_logprob(one: TokenLogprob) -> list[Any]:
    return [one.token, one.raw, one.processed, one.top]


def _unpack_logprob(packed: list[Any]) -> TokenLogprob:
    token, raw, processed, top = packed
    return TokenLogprob(token, raw, processed, tuple((i, r, p) for i, r, p in top))
