"""What a server says of itself: models, health, version, settings, slots, metrics, traces; and what it has not."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from outrider._version import __version__
from outrider.serve.errors import ApiError
from outrider.serve.front import Front

MISSING = {
    "/v1/embeddings": "embeddings", "/v1/rerank": "ranking", "/rerank": "ranking", "/v1/score": "scoring",
    "/v1/audio/transcriptions": "audio", "/v1/audio/translations": "audio", "/v1/audio/speech": "audio",
    "/v1/images/generations": "images", "/v1/images/edits": "images", "/v1/moderations": "moderation",
    "/v1/files": "files", "/v1/batches": "batches", "/v1/fine_tuning/jobs": "fine-tuning", "/infill": "infilling",
    "/v1/messages/batches": "batches",
}  # fmt: skip


def _model(front: Front, name: str) -> dict[str, Any]:
    info = front.link.info
    return {
        "id": name, "object": "model", "created": front.created, "owned_by": "outrider",
        "root": info.model, "parent": None, "max_model_len": info.max_context, "type": "model",
        "display_name": name, "created_at": _moment(front.created),
        "meta": {"n_vocab": info.vocab_size, "n_ctx": info.max_context, "methods": list(info.methods),
                 "method": info.method, "runtime": info.runtime, "precision": info.precision},
    }  # fmt: skip


def _moment(seconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def models(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    data = [_model(front, name) for name in front.names]
    ids = [one["id"] for one in data]
    return JSONResponse({"object": "list", "data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})


async def model(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    name = http.path_params["name"]
    front.check_model(name)
    return JSONResponse(_model(front, name))


async def health(http: HttpRequest) -> Response:
    """Whether this process lives; whether it takes requests is `/ready`."""
    return JSONResponse({"status": "ok"})


async def ready(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    if front.draining or not front.link.ready:
        state = "draining" if front.draining else "loading"
        return JSONResponse({"status": state}, 503, headers={"Retry-After": "1"})
    return JSONResponse({"status": "ok"})


async def version(http: HttpRequest) -> Response:
    return JSONResponse({"version": __version__})


async def props(http: HttpRequest) -> Response:
    """llama.cpp's route: what the model is and what requests are given by default."""
    front: Front = http.app.state.front
    info = front.link.info
    return JSONResponse({
        "default_generation_settings": {
            "n_ctx": info.max_context, "params": {"temperature": 1.0} | front.settings.defaults,
        },
        "total_slots": info.slots,
        "model_path": info.model,
        "model_alias": front.names[0],
        "chat_template": front.text.template or "",
        "bos_token": str(front.text.tokenizer.bos_token or ""),
        "eos_token": str(front.text.tokenizer.eos_token or ""),
        "build_info": f"outrider {__version__}",
        "outrider": {
            "method": info.method, "methods": list(info.methods), "runtime": info.runtime, "precision": info.precision,
            "device": info.device, "same_bits": info.same_bits, "fingerprint": info.fingerprint,
            "unknown_fields": front.settings.unknown,
        },
    })  # fmt: skip


async def slots(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    busy = {one["slot"]: one for one in await front.link.slots() if one.get("running")}
    out = []
    for place in range(max([front.link.info.slots, *(slot + 1 for slot in busy)])):
        one = busy.get(place)
        out.append({"id": place, "is_processing": one is not None, "n_ctx": front.link.info.max_context,
                    **({} if one is None else {"task": dict(one)})})  # fmt: skip
    return JSONResponse(out)


async def metrics(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    return PlainTextResponse(await front.link.render(), media_type="text/plain; version=0.0.4")


async def trace(http: HttpRequest) -> Response:
    """Every step of a request that asked for it."""
    front: Front = http.app.state.front
    id = http.path_params["id"]
    for form in (id, id.partition("-")[2]):  # the id of an answer begins with its kind
        if form and (found := await front.link.trace(form)) is not None:
            return JSONResponse(dict(found))
    raise ApiError(
        404, f'no trace of {id[:100]!r}; send the request with "outrider": {{"trace": true}}, and ask soon', param="id"
    )


async def corpora(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    return JSONResponse({"object": "list", "data": [dict(one) for one in front.link.info.corpora]})


async def missing(http: HttpRequest) -> Response:
    what = MISSING[http.url.path.rstrip("/") or "/"]
    raise ApiError(501, f"{what}: this server generates text only", code="not_implemented")
