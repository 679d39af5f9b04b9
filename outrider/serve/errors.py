"""Faults as clients know them: a status, and `{error: {message, type, param, code}}`, or Anthropic's form of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from outrider.core.errors import ClosedEngine, FullQueue, InputError, OutriderError, UnknownName

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error",
    429: "rate_limit_error", 431: "request_too_large", 500: "api_error", 501: "not_implemented_error",
    503: "overloaded_error",
}  # fmt: skip
RETRY_S = 1  # seconds after which a client may ask again


class ApiError(Exception):
    """A fault with its status; `param` names the field it lies in."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "api_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        kind = {501: "api_error", 408: "timeout_error"}.get(self.status, TYPES.get(self.status, "api_error"))
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def of(error: BaseException) -> ApiError:
    """What a client is told of an error. What is no fault of its request says nothing about our insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return of_schema(error)
    if isinstance(error, FullQueue):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_S)})
    if isinstance(error, ClosedEngine):
        return ApiError(503, str(error), code="draining", headers={"Retry-After": str(RETRY_S)})
    if isinstance(error, UnknownName):
        return ApiError(400, str(error), param="method", code="unknown_method")
    if isinstance(error, InputError | OutriderError):
        return ApiError(400, " ".join(str(error).split()), code="invalid_value")
    return ApiError(500, "the server failed; its log says how", code="internal")


def of_schema(error: ValidationError) -> ApiError:
    """The first fault, with the place of the field in the request."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return ApiError(400, f"{place or 'the request'}: {first['msg']}{more}"[:2000], param=place[:200] or None,
                    code="invalid_value")  # fmt: skip


def response(error: ApiError, path: str) -> Response:
    body = error.anthropic if path.startswith("/v1/messages") else error.body
    return JSONResponse(body, error.status, headers=error.headers)
