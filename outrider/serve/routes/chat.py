"""`/v1/chat/completions`: OpenAI's chat, whole or streamed, with tools, reasoning and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.serve.answer.choice import Choice, chat_logprobs, origins, prompt_report, timings, usage
from outrider.serve.answer.sse import DONE, EventResponse, event, guarded
from outrider.serve.constraints import form_of_text
from outrider.serve.forms.chat import ChatForm
from outrider.serve.front import Front, Run, unless_gone
from outrider.serve.link.seam import Delta, End, PromptReport
from outrider.serve.parse.pieces import CallArguments, CallBegins, Piece
from outrider.serve.routes.conversation import Conversation, begin, ended, followed, gathered


async def chat(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, ChatForm)
    template = dict(form.chat_template_kwargs or {})
    if form.reasoning_effort is not None:
        template.setdefault("reasoning_effort", form.reasoning_effort)
    talk = begin(
        front, form, http, [message.plain() for message in form.messages], form.offered_tools,
        go_on=bool(form.continue_final_message), answer=form.add_generation_prompt is not False, template=template,
        form_of_text=form_of_text(
            form, form.offered_tools, form.forced_tool, parallel=form.parallel_tool_calls is not False
        ),
    )  # fmt: skip
    run = await front.run(talk.requests)
    if form.stream:
        chunks = _chunks(front, form, talk, run, http.state.request_id)
        return EventResponse(run, guarded(chunks, http.url.path), headers)
    made = await unless_gone(http, front.settings.request_s, gathered(run, talk.choices()))
    body = {
        **_head(front, http.state.request_id, "chat.completion"),
        "choices": [_whole(form, choice, front) for choice in made],
        "usage": usage(made),
        "timings": timings(made),
    }
    if form.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_report(made[0].report, front.text)
    if form.return_token_ids:
        body["prompt_token_ids"] = list(talk.requests[0].prompt)
    return JSONResponse(body, headers=headers)


def _head(front: Front, id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": front.names[0],
            "system_fingerprint": None, "service_tier": None}  # fmt: skip


def _whole(form: ChatForm, choice: Choice, front: Front) -> dict[str, Any]:
    parsed = choice.parsed
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.calls:
        message["content"] = parsed.content.strip() or None
        message["tool_calls"] = [call.openai for call in parsed.calls]
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if form.echo and form.continue_final_message:
        last = form.messages[-1].content
        message["content"] = (last if isinstance(last, str) else "") + (message["content"] or "")
    out: dict[str, Any] = {
        "index": choice.index, "message": message, "finish_reason": choice.finish,
        "logprobs": chat_logprobs(choice.logprobs, front.text) if form.logprobs else None,
    }  # fmt: skip
    return out | _beside(form, choice)


def _beside(form: ChatForm, choice: Choice) -> dict[str, Any]:
    """What only those get who asked, and how a text ended."""
    assert choice.end is not None
    out: dict[str, Any] = {"stop_reason": choice.end.stop}
    if form.return_token_ids:
        out["token_ids"] = choice.tokens
    if form.outrider and form.outrider.origins:
        out["outrider"] = {"origins": origins(choice.origins), "seed": choice.end.seed, "resumed": choice.end.resumed}
    return out


async def _chunks(front: Front, form: ChatForm, talk: Conversation, run: Run, id: str) -> AsyncIterator[bytes]:
    head, made = _head(front, id, "chat.completion.chunk"), talk.choices()
    counts = bool(form.stream_options and form.stream_options.include_usage)
    live = counts and bool(form.stream_options and form.stream_options.continuous_usage_stats)

    def chunk(choice: Choice, delta: dict[str, Any], last: bool = False, **more: Any) -> bytes:
        one = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        tail: dict[str, Any] = {"usage": usage(made.values()) if live else None} if counts else {}
        if last:
            tail = {**tail, "timings": timings(made.values())}
        return event({**head, "choices": [one], **tail})

    for choice in made.values():
        yield chunk(choice, {"role": "assistant", "content": ""})
    held: dict[int, tuple[list[Piece], Delta]] = {}
    async for choice, told, pieces in followed(run, made):
        if isinstance(told, PromptReport):
            continue
        delta = told if isinstance(told, Delta) else Delta(told.sample)
        before = held.pop(choice.index, None)
        if before is not None:
            pieces, delta = before[0] + pieces, before[1] + delta
        if isinstance(told, Delta) and len(delta.tokens) < (form.stream_interval or 1):
            held[choice.index] = pieces, delta
            continue
        more = _of_tokens(form, delta, front)
        for change in changes(pieces, choice) or ([{}] if more and delta.tokens else []):
            yield chunk(choice, change, **more)
            more = {}
        if isinstance(told, End):
            yield chunk(choice, {}, last=ended(made), finish_reason=choice.finish, stop_reason=told.stop)
    if counts:
        yield event({**head, "choices": [], "usage": usage(made.values()), "timings": timings(made.values())})
    yield DONE


def _of_tokens(form: ChatForm, delta: Delta, front: Front) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if form.logprobs and delta.logprobs:
        out["logprobs"] = chat_logprobs(delta.logprobs, front.text)
    if form.return_token_ids:
        out["token_ids"] = list(delta.tokens)
    if form.outrider and form.outrider.origins:
        out["outrider"] = {"origins": origins(delta.origins)}
    return out


def changes(pieces: list[Piece], choice: Choice) -> list[dict[str, Any]]:
    """The deltas of a message: neighbours of one kind are one."""
    out: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            call = choice.parsed.calls[piece.index]
            function = {"name": call.name, "arguments": ""}
            out.append(
                {"tool_calls": [{"index": piece.index, "id": call.id, "type": "function", "function": function}]}
            )
        elif isinstance(piece, CallArguments):
            out.append({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]})
        else:
            name = "content" if piece.kind == "content" else "reasoning_content"
            if out and name in out[-1]:
                out[-1][name] += piece.text
            else:
                out.append({name: piece.text})
    return out
