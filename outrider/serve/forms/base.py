"""Reading a request: JSON within reason, then a form whose fields are checked, and the fields that no form knows."""

from __future__ import annotations

import json
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from outrider.serve.errors import ApiError
from outrider.serve.settings import Unknown

Anything = TypeVar("Anything", bound="Form")
DEEPEST = 100  # levels of lists and objects in a request


class Form(BaseModel):
    """Of a request. Types are not guessed at: "1" is no number; null is the same as nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def unknown(cls, given: dict[str, Any]) -> list[str]:
        known = set(cls.model_fields) | {field.alias for field in cls.model_fields.values() if field.alias}
        return [name for name in given if name not in known]

    @classmethod
    def read(cls, given: dict[str, Any], unknown: Unknown) -> tuple[Self, list[str]]:
        """The form, and the names of the fields that were left out because nobody knows them."""
        left_out = cls.unknown(given)
        if left_out and unknown == "refuse":
            raise ApiError(400, f"unknown field {left_out[0]!r}"[:200], param=left_out[0][:100], code="unknown_field")
        return cls.model_validate(given), left_out


class Part(BaseModel):
    """A piece of a form; what is not known of it goes on to whoever reads it, such as a chat template."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


def read_json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        _check_depth(value)
        if b"\\u" in body:
            _check_surrogates(value)
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is no UTF-8: {error.reason} at byte {error.start}", code="invalid_json"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object; send {...}", code="invalid_json")
    return cast(dict[str, Any], value)


def _check_surrogates(value: object) -> None:
    """Half a pair is no text: neither a tokenizer nor an answer could hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        told = "a text in the body has half a surrogate pair; send whole characters"
        raise ApiError(400, told, code="invalid_json") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {DEEPEST} levels", code="invalid_json")


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _too_deep()
