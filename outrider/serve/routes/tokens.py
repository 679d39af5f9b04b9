"""`/tokenize`, `/detokenize`, `/apply-template`: what the model reads, in vLLM's and llama.cpp's words."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.core.errors import InputError
from outrider.serve.forms.others import DetokenizeForm, TemplateForm, TokenizeForm
from outrider.serve.front import Front


async def tokenize(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, TokenizeForm)
    text = form.prompt if form.prompt is not None else form.content
    if (text is None) == (form.messages is None):
        raise InputError("give prompt (or content), or messages")
    if text is not None:
        special = (form.add_special_tokens if form.add_special_tokens is not None else form.add_special) is not False
        ids = front.text.encode(text, special)
    else:
        ids = front.text.encode(_shown(front, form), special=False)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": front.link.info.max_context, "tokens": ids}
    if form.return_token_strs or form.with_pieces:
        body["token_strs"] = [front.text.piece(token)[0] for token in ids]
    if form.with_pieces:
        body["tokens"] = [{"id": token, "piece": front.text.piece(token)[0]} for token in ids]
    return JSONResponse(body, headers=headers)


async def detokenize(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, DetokenizeForm)
    text = front.text.decode(form.tokens)
    return JSONResponse({"prompt": text, "content": text}, headers=headers)


async def apply_template(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, TemplateForm)
    return JSONResponse({"prompt": _shown(front, form)}, headers=headers)


def _shown(front: Front, form: TemplateForm | TokenizeForm) -> str:
    return front.text.chat_text(
        [message.plain() for message in form.messages or ()], [tool.model_dump() for tool in form.tools or ()],
        go_on=bool(form.continue_final_message), answer=form.add_generation_prompt is not False,
        **(form.chat_template_kwargs or {}),
    )  # fmt: skip
