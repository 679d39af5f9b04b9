"""What the three forms of a conversation share: the prompt, how its answer is read, and the choices as they grow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from outrider.serve.answer.choice import Choice, choices
from outrider.serve.forms.sampling import Sampling
from outrider.serve.front import Front, Run
from outrider.serve.link.seam import Event, Request
from outrider.serve.parse.pieces import Piece
from outrider.serve.parse.reader import Reading, opens_reasoning, shown_specials
from outrider.serve.parse.tools import form_of


@dataclass(frozen=True, slots=True)
class Conversation:
    requests: Sequence[Request]
    reading: Reading

    def choices(self) -> dict[tuple[int, int], Choice]:
        return choices(self.requests, self.reading)


def begin(
    front: Front, form: Sampling, http: HttpRequest, messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (), *, go_on: bool = False, answer: bool = True,
    template: Mapping[str, Any] | None = None, form_of_text: Mapping[str, Any] | None = None,
) -> Conversation:  # fmt: skip
    """The requests for an answer to these messages."""
    shown = front.text.chat_text(messages, tools, go_on=go_on, answer=answer, **(template or {}))
    prompt = front.text.encode(shown, special=False)
    tool_form = form_of(front.text.template) if tools else None
    specials = shown_specials(tool_form, front.text.specials)
    names = tuple(str(tool["function"]["name"]) for tool in tools)
    reading = Reading(tool_form, names, begun=opens_reasoning(shown), hidden=specials or ())
    requests = front.requests(form, [prompt], http, form_of_text=form_of_text, show_special=specials is not None)
    return Conversation(requests, reading)


async def gathered(run: Run, made: Mapping[tuple[int, int], Choice]) -> Sequence[Choice]:
    """All choices, complete, in order."""
    try:
        async for place, event in run.events():
            for choice in _meant(made, place, event):
                choice.take(event)
    finally:
        await run.aclose()
    return sorted(made.values(), key=lambda choice: choice.index)


async def followed(
    run: Run, made: Mapping[tuple[int, int], Choice]
) -> AsyncIterator[tuple[Choice, Event, list[Piece]]]:
    """Each event with its choice and what it adds."""
    async for place, event in run.events():
        for choice in _meant(made, place, event):
            yield choice, event, choice.take(event)


def _meant(made: Mapping[tuple[int, int], Choice], place: int, event: Event) -> Iterable[Choice]:
    sample = getattr(event, "sample", None)
    if sample is not None:
        return (made[place, sample],)
    return [choice for (at, _), choice in made.items() if at == place]  # a report on the prompt is for all of them


def ended(made: Mapping[tuple[int, int], Choice]) -> bool:
    return all(choice.end is not None for choice in made.values())
