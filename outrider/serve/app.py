"""The application: routes, errors in one form, and the engine's life around them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.core.errors import OutriderError
from outrider.serve import errors, page
from outrider.serve.errors import ApiError
from outrider.serve.front import ClientGone, Front
from outrider.serve.guard import Guard
from outrider.serve.link.seam import EngineLink
from outrider.serve.metrics.observed import Observed
from outrider.serve.openapi import document
from outrider.serve.routes import chat, completion, messages, responses, state, tokens
from outrider.serve.settings import Settings
from outrider.serve.text import Text

log = logging.getLogger("outrider")
GONE = 499  # nobody reads this; it is for the log

POST = {
    "/v1/chat/completions": chat.chat,
    "/v1/completions": completion.completion,
    "/v1/responses": responses.responses,
    "/v1/messages": messages.messages,
    "/v1/messages/count_tokens": messages.count_tokens,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/apply-template": tokens.apply_template,
}
GET = {
    "/v1/models": state.models,
    "/v1/models/{name:path}": state.model,
    "/health": state.health,
    "/ready": state.ready,
    "/version": state.version,
    "/props": state.props,
    "/slots": state.slots,
    "/metrics": state.metrics,
    "/v1/outrider/trace/{id}": state.trace,
    "/v1/outrider/corpora": state.corpora,
}


def make_app(link: EngineLink, text: Text, settings: Settings | None = None) -> Starlette:
    """The server over an engine, which is started and closed with it."""
    link = Observed(link)
    front = Front(link, text, settings or Settings())

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        try:
            await link.start()
        except OutriderError as error:
            app.state.refused = error  # for who runs the server, who says it in a line
            raise
        try:
            yield
        finally:
            front.draining = True
            await link.close()

    async def openapi(http: HttpRequest) -> Response:
        return JSONResponse(document(front.names[0]))

    routes = [Route(path, run, methods=["POST"]) for path, run in POST.items()]
    routes += [Route(path, run, methods=["GET"]) for path, run in (GET | page.ROUTES).items()]
    routes += [Route(path, state.missing, methods=["GET", "POST"]) for path in state.MISSING]
    routes += [Route("/openapi.json", openapi, methods=["GET"])]
    guards = [Middleware(Guard, settings=front.settings)]
    if front.settings.cors:
        allowed = {"allow_origins": list(front.settings.cors), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        guards.insert(0, Middleware(CORSMiddleware, **allowed))  # type: ignore[arg-type]
    app = Starlette(
        routes=routes, middleware=guards, lifespan=life,
        exception_handlers={
            HTTPException: _http_error, ApiError: _error, OutriderError: _error, ValidationError: _error,
            ClientGone: _gone, ClientDisconnect: _gone, Exception: _error,
        },
    )  # fmt: skip
    app.router.redirect_slashes = False
    app.state.front, app.state.refused = front, None
    return app


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no route {http.url.path[:100]!r}", 405: "this route takes another method"}
    told = ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=error.headers)
    return errors.response(told, http.url.path)


async def _error(http: HttpRequest, error: Exception) -> Response:
    told = errors.of(error)
    if told.status == 500:
        log.error("%s %s failed: %r", http.method, http.url.path, error, exc_info=error)
    return errors.response(told, http.url.path)


async def _gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=GONE)
