"""What stands before every route: keys, sizes of header and body, the time to send one, and an id for the answer."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import ApiError, response
from outrider.serve.settings import Settings

OPEN = ("/", "/health", "/ready")  # what a load balancer asks without a key, and the page: it asks for one
OPEN_FOLDER = "/page/"


class Guard:
    """An ASGI layer. Keeps nothing of a request but the name of its key, in `scope["state"]["caller"]`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self._keys = [(name, _digest(key)) for name, key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = _told_id(headers) or f"req-{uuid.uuid4().hex}"
        try:
            self._check_size(scope)
            state["caller"] = self._caller(scope, headers)
        except ApiError as error:
            await response(error, scope["path"])(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), _named(send, state["request_id"]))

    def _check_size(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        size += len(scope["path"]) + len(scope.get("query_string", b""))
        if size > self.settings.max_header_bytes:
            raise ApiError(431, f"the header has {size} bytes; at most {self.settings.max_header_bytes} are read")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        most = self.settings.max_body_bytes
        return ApiError(413, f"the body is larger than {most} bytes; send less, or start with --max-body-bytes")

    def _caller(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """The name of the key that came; every key is compared, each in constant time."""
        path, method = scope["path"], scope["method"]
        if not self._keys or path in OPEN or path.startswith(OPEN_FOLDER) or method == "OPTIONS":
            return ""
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        digest, caller = hashlib.sha256(given).digest(), ""
        for name, known in self._keys:
            if hmac.compare_digest(digest, known):
                caller = name
        if not caller:
            raise ApiError(
                401, "no key, or a wrong one; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return caller

    def _bounded(self, receive: Receive) -> Receive:
        """The body within its size and time. Later calls wait for the end of the connection, as long as that takes."""
        seen, complete = 0, False

        async def bounded() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(self.settings.body_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {self.settings.body_s:g} s") from None
            seen += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if seen > self.settings.max_body_bytes:
                raise self._too_large()
            return message

        return bounded


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _told_id(headers: dict[bytes, bytes]) -> str:
    """The client's name for its request, where it can be repeated in a header."""
    told = headers.get(b"x-request-id", b"").decode("latin-1")
    return told if told.isascii() and told.isprintable() and len(told) <= 128 else ""


def _named(send: Send, id: str) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra: Iterable[tuple[bytes, bytes]] = [(b"x-request-id", id.encode()), (b"request-id", id.encode())]
            message["headers"] = [*message.get("headers", ()), *extra]
        await send(message)

    return named
