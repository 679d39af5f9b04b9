"""One sample as it grows, and the figures that stand beside an answer, in the words of OpenAI and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.generation import FinishReason, Origin, TokenLogprob
from outrider.serve.errors import ApiError
from outrider.serve.link.seam import Delta, End, Event, PromptReport, Request
from outrider.serve.parse.pieces import Parser, Piece, Said
from outrider.serve.parse.reader import Parsed, Reading
from outrider.serve.text import Text

FINISH = {
    FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTEXT: "length",
    FinishReason.CANCELLED: "abort", FinishReason.ERROR: "error",
}  # fmt: skip


@dataclass(slots=True)
class Choice:
    """Changes state with `take`."""

    request: Request
    index: int
    parser: Parser
    parsed: Parsed = field(default_factory=Parsed)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoned: int = 0  # tokens of reasoning: those of steps that brought nothing else
    report: PromptReport | None = None
    end: End | None = None

    def take(self, event: Event) -> list[Piece]:
        """What the event adds. An end that is an error is raised."""
        if isinstance(event, PromptReport):
            self.report = event
            return []
        pieces = self.parser.feed(event.text)
        self.text += event.text
        if isinstance(event, Delta):
            self.tokens += event.tokens
            self.origins += event.origins
            self.logprobs += event.logprobs or ()
            if pieces and all(isinstance(piece, Said) and piece.kind == "reasoning" for piece in pieces):
                self.reasoned += len(event.tokens)
        else:
            self.end = event
            check_end(event)
            pieces += self.parser.finish()
        for piece in pieces:
            self.parsed.add(piece)
        return pieces

    @property
    def finish(self) -> str:
        assert self.end is not None
        reason = FINISH[self.end.finish]
        return "tool_calls" if self.parsed.calls and reason == "stop" else reason


def choices(requests: Sequence[Request], reading: Reading) -> dict[tuple[int, int], Choice]:
    """By request and sample."""
    made = {}
    for place, request in enumerate(requests):
        for sample in range(request.params.n):
            index = place * request.params.n + sample
            made[place, request.sample + sample] = Choice(request, index, reading.parser())
    return made


def check_end(end: End) -> None:
    if end.finish is FinishReason.ERROR:
        failed = end.error.startswith("the engine failed")
        raise ApiError(500 if failed else 400, end.error or "the request could not go on", code="generation_failed")


def usage(made: Iterable[Choice]) -> dict[str, Any]:
    """Each request's prompt counts once, however many samples it has."""
    all_of = list(made)
    prompts = {id(one.request): one for one in all_of}.values()
    prompt = sum(len(one.request.prompt) for one in prompts)
    new = sum(len(one.tokens) for one in all_of)
    ends = [one.end for one in all_of if one.end is not None]
    accepted = sum(end.accepted_prediction for end in ends)
    predicted = sum(len(one.request.params.prediction) for one in all_of)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {
            "cached_tokens": sum(one.end.cached_tokens for one in prompts if one.end is not None), "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted - accepted, 0),
            "reasoning_tokens": sum(one.reasoned for one in all_of),
            "audio_tokens": 0,
        },
    }  # fmt: skip


def timings(made: Iterable[Choice]) -> dict[str, Any]:
    """llama.cpp's names, and what speculation did. Of several samples the sums; rates are of all of them."""
    all_of = [one for one in made if one.end is not None]
    stats = [one.end.stats for one in all_of if one.end is not None]
    prompts = {id(one.request): one for one in all_of}.values()
    prompt_n = sum(len(one.request.prompt) for one in prompts)
    cached = sum(one.end.cached_tokens for one in prompts if one.end is not None)
    prompt_ms = max((float(one.get("ttft_ms", 0.0)) for one in stats), default=0.0)
    ms = 1e3 * sum(float(s.get("draft_s", 0)) + float(s.get("verify_s", 0)) + float(s.get("rest_s", 0)) for s in stats)
    new, steps = sum(len(one.tokens) for one in all_of), sum(int(s.get("steps", 0)) for s in stats)
    resumed = next((one.end.resumed for one in all_of if one.end is not None and one.end.resumed), "")
    return {
        "cache_n": cached,
        "prompt_n": prompt_n - cached,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * (prompt_n - cached) / prompt_ms if prompt_ms else 0.0,
        "predicted_n": new,
        "predicted_ms": ms,
        "predicted_per_token_ms": ms / new if new else 0.0,
        "predicted_per_second": 1e3 * new / ms if ms else 0.0,
        "draft_n": sum(int(s.get("drafted", 0)) for s in stats),
        "draft_n_accepted": sum(int(s.get("accepted", 0)) for s in stats),
        "steps": steps,
        "accepted_length": new / steps if steps else 0.0,
        "queue_ms": max((float(s.get("queue_ms", 0.0)) for s in stats), default=0.0),
        "method": next((str(s["method"]) for s in stats if s.get("method")), ""),
        **({"resumed": resumed} if resumed else {}),
    }


def origins(found: Sequence[Origin]) -> list[dict[str, Any]]:
    """Who brought each token: a drafter at a depth of its tree, or the target itself."""
    return [{"drafter": one.drafter, "depth": one.depth} for one in found]


def chat_logprobs(found: Sequence[TokenLogprob], text: Text) -> dict[str, Any]:
    return {"content": [_entry(one, text) for one in found], "refusal": None}


def _entry(one: TokenLogprob, text: Text) -> dict[str, Any]:
    top = [_logprob(token, raw, text) for token, raw, _ in one.top]
    return {**_logprob(one.token, one.raw, text), "top_logprobs": top}


def _logprob(token: int, value: float, text: Text) -> dict[str, Any]:
    piece, raw = text.piece(token)
    return {"token": piece, "logprob": finite(value), "bytes": raw}


def finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes this for what cannot be."""
    return max(value, -9999.0)


def completion_logprobs(found: Sequence[TokenLogprob | None], offset: int, text: Text) -> dict[str, Any]:
    """The older form: lists side by side. None stands for a prompt's first token, which nothing precedes."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for one in found:
        offsets.append(offset)
        piece = text.piece(one.token)[0] if one is not None else ""
        offset += len(piece)
        tokens.append(piece)
        values.append(None if one is None else finite(one.raw))
        tops.append(None if one is None else {text.piece(t)[0]: finite(raw) for t, raw, _ in one.top})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_report(report: PromptReport | None, text: Text) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each place of the prompt the tokens that were looked at, by id."""
    if report is None:
        return None
    out: list[dict[str, Any] | None] = []
    for one in report.logprobs:
        if one is None:
            out.append(None)
            continue
        ranked = {token: (raw, rank) for rank, (token, raw, _) in enumerate(one.top, 1)}
        found = {token: (raw, rank) for token, (raw, rank) in ranked.items()}
        found.setdefault(one.token, (one.raw, 0))
        out.append({
            str(token): {"logprob": finite(raw), "rank": rank or None, "decoded_token": text.piece(token)[0]}
            for token, (raw, rank) in found.items()
        })  # fmt: skip
    return out
