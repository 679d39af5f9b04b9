"""`/v1/responses`: OpenAI's newer form, whole or streamed, without state."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.serve.answer.blocks import Block, Blocks, Change
from outrider.serve.answer.choice import Choice, chat_logprobs, timings, usage
from outrider.serve.answer.sse import EventResponse, event, guarded
from outrider.serve.constraints import form_of_text
from outrider.serve.forms.responses import ResponsesForm
from outrider.serve.front import Front, Run, unless_gone
from outrider.serve.link.seam import End
from outrider.serve.routes.conversation import Conversation, begin, followed, gathered


async def responses(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, ResponsesForm)
    form.check()
    wanted = (form.text or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") not in (None, "text"):
        schema = {"type": "json_schema", "json_schema": wanted} if wanted.get("type") == "json_schema" else wanted
        form = form.model_copy(update={"response_format": schema})
    talk = begin(
        front, form, http, form.plain(), form.offered_tools, template=form.template,
        form_of_text=form_of_text(
            form, form.offered_tools, form.forced_tool, parallel=form.parallel_tool_calls is not False
        ),
    )  # fmt: skip
    run = await front.run(talk.requests)
    head = _head(front, form, http.state.request_id)
    if form.stream:
        return EventResponse(run, guarded(_events(front, form, talk, run, head), http.url.path), headers)
    (choice,) = await unless_gone(http, front.settings.request_s, gathered(run, talk.choices()))
    parsed = choice.parsed
    items = [Block(0, "reasoning", parsed.reasoning)] if parsed.reasoning else []
    if parsed.content.strip() or not (parsed.calls or items):
        items.append(Block(len(items), "content", parsed.content))
    items += [Block(len(items) + i, "call", call.arguments, call) for i, call in enumerate(parsed.calls)]
    return JSONResponse(_finished(front, form, head, choice, items), headers=headers)


def _head(front: Front, form: ResponsesForm, id: str) -> dict[str, Any]:
    return {
        "id": f"resp_{id}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": form.instructions,
        "max_output_tokens": form.max_output_tokens, "metadata": form.metadata or {}, "model": front.names[0],
        "output": [], "parallel_tool_calls": form.parallel_tool_calls is not False, "previous_response_id": None,
        "reasoning": {"effort": (form.reasoning or {}).get("effort"), "summary": None}, "service_tier": "default",
        "store": False, "temperature": 1.0 if form.temperature is None else form.temperature,
        "text": {"format": {"type": "text"}, **(form.text or {})}, "tool_choice": form.tool_choice or "auto",
        "tools": [{"strict": None, **tool} for tool in form.tools or ()], "top_logprobs": form.top_logprobs or 0,
        "top_p": 1.0 if form.top_p is None else form.top_p, "truncation": "disabled", "usage": None, "user": form.user,
    }  # fmt: skip


def _finished(
    front: Front, form: ResponsesForm, head: dict[str, Any], choice: Choice, items: list[Block]
) -> dict[str, Any]:
    cut = choice.finish == "length"
    counts = usage([choice])
    logprobs = chat_logprobs(choice.logprobs, front.text)["content"] if form.top_logprobs is not None else []
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [_item(block, head["id"], "incomplete" if cut else "completed", logprobs) for block in items],
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": choice.reasoned},
            "total_tokens": counts["total_tokens"],
        },
        "timings": timings([choice]),
    }


def _item(block: Block, id: str, status: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    name = id.removeprefix("resp_")
    if block.call is not None:
        return {"type": "function_call", "id": f"fc_{block.call.id}", "call_id": block.call.id, "name": block.call.name,
                "arguments": block.text, "status": status}  # fmt: skip
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
        return {"type": "reasoning", "id": f"rs_{name}_{block.index}", "summary": [], "content": content,
                "status": status}  # fmt: skip
    content = [] if status == "in_progress" else [_part(block.text, logprobs)]
    return {"type": "message", "id": f"msg_{name}_{block.index}", "role": "assistant", "status": status,
            "content": content}  # fmt: skip


def _part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


async def _events(
    front: Front, form: ResponsesForm, talk: Conversation, run: Run, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    number = 0

    def shown(data: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return event({**data, "sequence_number": number - 1}, str(data["type"]))

    made = talk.choices()
    (choice,) = made.values()
    blocks = Blocks(choice.parsed)
    yield shown({"type": "response.created", "response": head})
    yield shown({"type": "response.in_progress", "response": head})
    async for _, told, pieces in followed(run, made):
        for change in [*blocks.feed(pieces), *(blocks.finish() if isinstance(told, End) else ())]:
            for data in _of_change(change, head["id"]):
                yield shown(data)
        if isinstance(told, End):
            body = _finished(front, form, head, choice, blocks.blocks)
            yield shown({"type": f"response.{body['status']}", "response": body})


def _of_change(change: Change, id: str) -> Iterator[dict[str, Any]]:
    block = change.block
    item = _item(block, id, "in_progress" if change.action != "close" else "completed")
    where = {"item_id": item["id"], "output_index": block.index}
    part = {**where, "content_index": 0}
    if change.action == "open":
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind == "content":
            yield {"type": "response.content_part.added", **part, "part": _part("")}
    elif change.action == "more":
        if block.kind == "call":
            yield {"type": "response.function_call_arguments.delta", **where, "delta": change.text}
        elif block.kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **part, "delta": change.text}
        else:
            yield {"type": "response.output_text.delta", **part, "delta": change.text, "logprobs": []}
    else:
        if block.call is not None:
            yield {"type": "response.function_call_arguments.done", **where, "arguments": block.text,
                   "name": block.call.name}  # fmt: skip
        elif block.kind == "reasoning":
            yield {"type": "response.reasoning_text.done", **part, "text": block.text}
        else:
            yield {"type": "response.output_text.done", **part, "text": block.text, "logprobs": []}
            yield {"type": "response.content_part.done", **part, "part": _part(block.text)}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}
