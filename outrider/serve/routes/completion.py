"""`/v1/completions`: texts continued as they are, several prompts at once, with the older form of log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.core.generation import TokenLogprob
from outrider.serve.answer.choice import (
    Choice,
    choices,
    completion_logprobs,
    origins,
    prompt_report,
    timings,
    usage,
)
from outrider.serve.answer.sse import DONE, EventResponse, event, guarded
from outrider.serve.constraints import form_of_text
from outrider.serve.forms.completion import DEFAULT_NEW, CompletionForm
from outrider.serve.front import Front, Run, unless_gone
from outrider.serve.link.seam import Delta, End, PromptReport
from outrider.serve.parse.reader import Reading
from outrider.serve.routes.conversation import ended, followed, gathered

Choices = dict[tuple[int, int], Choice]


async def completion(http: HttpRequest) -> Response:
    front: Front = http.app.state.front
    form, headers = await front.read(http, CompletionForm)
    if form.echo and form.logprobs is not None and form.prompt_logprobs is None:
        form = form.model_copy(update={"prompt_logprobs": form.logprobs})
    prompts = form.prompts(front.text)
    requests = front.requests(form, prompts, http, default_new=DEFAULT_NEW, form_of_text=form_of_text(form))
    run = await front.run(requests)
    made = choices(requests, Reading(reasoning=False))
    if form.stream:
        chunks = _chunks(front, form, made, run, http.state.request_id)
        return EventResponse(run, guarded(chunks, http.url.path), headers)
    complete = await unless_gone(http, front.settings.request_s, gathered(run, made))
    body = {
        **_head(front, http.state.request_id),
        "choices": [_whole(form, choice, front) for choice in complete],
        "usage": usage(complete),
        "timings": timings(complete),
    }
    return JSONResponse(body, headers=headers)


def _head(front: Front, id: str) -> dict[str, Any]:
    return {"id": f"cmpl-{id}", "object": "text_completion", "created": int(time.time()), "model": front.names[0],
            "system_fingerprint": None}  # fmt: skip


def _whole(form: CompletionForm, choice: Choice, front: Front) -> dict[str, Any]:
    assert choice.end is not None
    prompt = front.text.decode(choice.request.prompt, special=False) if form.echo else ""
    found: Sequence[TokenLogprob | None] = choice.logprobs
    offset = len(prompt)
    if form.echo and choice.report is not None:
        found, offset = [*choice.report.logprobs, *choice.logprobs], 0
    out: dict[str, Any] = {
        "index": choice.index, "text": prompt + choice.text, "finish_reason": choice.finish,
        "stop_reason": choice.end.stop,
        "logprobs": completion_logprobs(found, offset, front.text) if form.logprobs is not None else None,
    }  # fmt: skip
    if form.prompt_logprobs is not None:
        out["prompt_logprobs"] = prompt_report(choice.report, front.text)
    if form.return_token_ids:
        out |= {"token_ids": choice.tokens, "prompt_token_ids": list(choice.request.prompt)}
    if form.outrider and form.outrider.origins:
        out["outrider"] = {"origins": origins(choice.origins), "seed": choice.end.seed, "resumed": choice.end.resumed}
    return out


async def _chunks(front: Front, form: CompletionForm, made: Choices, run: Run, id: str) -> AsyncIterator[bytes]:
    head = _head(front, id)
    counts = bool(form.stream_options and form.stream_options.include_usage)

    def chunk(choice: Choice, text: str, last: bool = False, **more: Any) -> bytes:
        one = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None, **more}
        tail = {"timings": timings(made.values())} if last else {}
        return event({**head, "choices": [one], **({"usage": None} if counts else {}), **tail})

    if form.echo:
        for choice in made.values():
            yield chunk(choice, front.text.decode(choice.request.prompt, special=False))
    held: dict[int, Delta] = {}
    offsets: dict[int, int] = {}
    async for choice, told, _ in followed(run, made):
        if isinstance(told, PromptReport):
            continue
        delta = told if isinstance(told, Delta) else Delta(told.sample, text=told.text)
        if (before := held.pop(choice.index, None)) is not None:
            delta = before + delta
        if isinstance(told, Delta) and len(delta.tokens) < (form.stream_interval or 1):
            held[choice.index] = delta
            continue
        more: dict[str, Any] = {}
        if form.logprobs is not None and delta.logprobs:
            at = offsets.get(choice.index, 0)
            more["logprobs"] = completion_logprobs(delta.logprobs, at, front.text)
            offsets[choice.index] = at + len(delta.text)
        if form.return_token_ids:
            more["token_ids"] = list(delta.tokens)
        if form.outrider and form.outrider.origins:
            more["outrider"] = {"origins": origins(delta.origins)}
        if isinstance(told, End):
            yield chunk(
                choice, delta.text, last=ended(made), finish_reason=choice.finish, stop_reason=told.stop, **more
            )
        elif delta.text or more:
            yield chunk(choice, delta.text, **more)
    if counts:
        yield event({**head, "choices": [], "usage": usage(made.values()), "timings": timings(made.values())})
    yield DONE
