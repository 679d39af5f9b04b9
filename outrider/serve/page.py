"""The page at `/`: its files with a strict policy, and the figures of its fleet view."""

from __future__ import annotations

import mimetypes

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.explain import page_files
from outrider.explain.headers import PAGE_HEADERS
from outrider.serve.errors import ApiError
from outrider.serve.front import Front

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


async def index(http: HttpRequest) -> Response:
    return _file("index.html")


async def part(http: HttpRequest) -> Response:
    return _file(http.path_params["name"])


async def fleet(http: HttpRequest) -> Response:
    """Everything that the fleet view shows; it asks once a second, and only while it is looked at."""
    front: Front = http.app.state.front
    info = front.link.info
    return JSONResponse({
        "info": {"model": front.names[0], "method": info.method, "slots": info.slots},
        "stats": dict(await front.link.stats()),
        "sequences": [dict(one) for one in await front.link.slots()],
    })  # fmt: skip


def _file(name: str) -> Response:
    path = page_files().get(name)
    if path is None:
        raise ApiError(404, f"the page has no file {name[:100]!r}")
    kind = KINDS.get(path.suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(path.read_bytes(), headers=PAGE_HEADERS, media_type=kind)


OPEN = {"/": index, "/page/{name}": part}  # without a key: they hold nothing of anybody
DATA = {"/v1/outrider/fleet": fleet}
ROUTES = {**OPEN, **DATA}
