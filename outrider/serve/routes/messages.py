"""`/v1/messages` and its `count_tokens`: Anthropic's form, whole or streamed, with tools and thinking."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.serve.answer.blocks import Block, Blocks, Change
from outrider.serve.answer.choice import Choice, timings, usage
from outrider.serve.answer.sse import EventResponse, event, guarded
from outrider.serve.constraints import form_of_text
from outrider.serve.errors import ApiError
from outrider.serve.forms.messages import CountForm, MessagesForm
from outrider.serve.front import Front, Run, unless_gone
from outrider.serve.link.seam import End
from outrider.serve.routes.conversation import Conversation, begin, followed, gathered

DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip


async def messages(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, MessagesForm)
    if form.n not in (None, 1):
        raise ApiError(400, "n: a message has one answer; leave it out", param="n")
    stops = [form.stop] if isinstance(form.stop, str) else list(form.stop or ())
    form = form.model_copy(update={"stop": [*stops, *(form.stop_sequences or ())]})
    talk = begin(
        front, form, http, form.plain(), form.offered_tools, template=form.template,
        form_of_text=form_of_text(form, form.offered_tools, form.forced_tool),
    )  # fmt: skip
    run = await front.run(talk.requests)
    id = f"msg_{http.state.request_id}"
    if form.stream:
        return EventResponse(run, guarded(_events(front, talk, run, id), http.url.path), headers)
    (choice,) = await unless_gone(http, front.settings.request_s, gathered(run, talk.choices()))
    return JSONResponse(_whole(front, choice, id), headers=headers)


async def count_tokens(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, CountForm)
    shown = front.text.chat_text(form.plain(), form.offered_tools, **form.template)
    return JSONResponse({"input_tokens": len(front.text.encode(shown, special=False))}, headers=headers)


def _message(front: Front, choice: Choice, id: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "model": front.names[0], "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": _usage(choice)}  # fmt: skip


def _usage(choice: Choice) -> dict[str, Any]:
    counts = usage([choice])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {"input_tokens": counts["prompt_tokens"] - cached, "output_tokens": counts["completion_tokens"],
            "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}  # fmt: skip


def _whole(front: Front, choice: Choice, id: str) -> dict[str, Any]:
    parsed = choice.parsed
    content: list[dict[str, Any]] = []
    if parsed.reasoning:
        content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content.strip() or not (parsed.calls or parsed.reasoning):
        content.append({"type": "text", "text": parsed.content})
    for call in parsed.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return _message(front, choice, id) | {"content": content, **_reason(choice), "timings": timings([choice])}


def _input(arguments: str) -> dict[str, Any]:
    """A call that was cut off has no arguments that could be read."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _reason(choice: Choice) -> dict[str, Any]:
    end = choice.end
    assert end is not None
    finish = choice.finish
    if finish == "stop" and isinstance(end.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
    return {"stop_reason": reasons[finish], "stop_sequence": None}


async def _events(front: Front, talk: Conversation, run: Run, id: str) -> AsyncIterator[bytes]:
    made = talk.choices()
    (choice,) = made.values()
    blocks = Blocks(choice.parsed)
    start = _message(front, choice, id)
    start["usage"]["output_tokens"] = 0
    yield event({"type": "message_start", "message": start}, "message_start")
    yield event({"type": "ping"}, "ping")
    async for _, told, pieces in followed(run, made):
        for change in [*blocks.feed(pieces), *(blocks.finish() if isinstance(told, End) else ())]:
            yield _shown(change)
        if isinstance(told, End):
            more = {"delta": _reason(choice), "usage": _usage(choice), "timings": timings([choice])}
            yield event({"type": "message_delta", **more}, "message_delta")
            yield event({"type": "message_stop"}, "message_stop")


def _shown(change: Change) -> bytes:
    block = change.block
    if change.action == "open":
        data = {"type": "content_block_start", "index": block.index, "content_block": _opened(block)}
    elif change.action == "close":
        data = {"type": "content_block_stop", "index": block.index}
    else:
        kind, name = DELTAS[block.kind]
        data = {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: change.text}}
    return event(data, str(data["type"]))


def _opened(block: Block) -> dict[str, Any]:
    if block.call is not None:
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}
