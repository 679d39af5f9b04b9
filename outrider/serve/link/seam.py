"""The seam between the front (HTTP, text, templates, users) and an engine: one protocol and the records that cross it.

Records hold numbers, texts, and tuples of them, so that they can be sent to another process. The front makes every
request complete (seed, tokens), and keeps what has come: with `resume` a request goes on in another engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.core.generation import FinishReason, Origin, TokenLogprob
from outrider.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine needs to know; it makes `params.n` texts, the samples `sample`, `sample` + 1, and so on.

    The seed is always set. With `resume` (one sample only) the text begins with these tokens behind the prompt, which
    are not sent again: what comes is exactly what follows them.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    method: str | None = None  # None: the engine's default
    sample: int = 0  # number of the first sample: a part of the key of its noise
    resume: tuple[int, ...] = ()
    priority: int = 0  # lower goes first, as in vLLM
    caller: str = ""  # whoever shares fairly with others: the name of a key, not the key
    salt: str = ""  # only requests with the same salt share prefixes and learnt drafts
    deadline_s: float | None = None  # seconds from now after which it is cancelled
    trace: bool = False  # keep every step, for `EngineLink.trace`


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of one sample that became text. Joined `text` of all deltas and the end is the whole text."""

    sample: int
    tokens: tuple[int, ...] = ()
    text: str = ""  # what became certain; may lag behind the tokens
    origins: tuple[Origin, ...] = ()  # one a token
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token, where they were asked for
    steps: int = 1

    def __add__(self, later: Delta) -> Delta:
        """Both as one, of the same sample: what a slow reader gets."""
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or ())
        return Delta(
            self.sample, self.tokens + later.tokens, self.text + later.text, self.origins + later.origins, logprobs,
            self.steps + later.steps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class End:
    """The last record of a sample. `text` is what was still held back."""

    sample: int
    finish: FinishReason
    text: str = ""
    stop: str | int | None = None  # the stop string or stop token id that ended it
    seed: int = 0
    stats: Mapping[str, Any] = field(default_factory=dict)  # of `Stats.as_dict`
    accepted_prediction: int = 0  # tokens of the request's prediction that the text agrees with
    cached_tokens: int = 0  # of the prompt, found in the cache
    error: str = ""  # with finish ERROR: why, in one line
    resumed: str = ""  # "": never; "same text": exact; "near ties" or "new draw": it may differ from an unbroken run


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of the prompt's tokens, sent once, before the first sample ends; None for the first token."""

    logprobs: tuple[TokenLogprob | None, ...]


Event = Delta | End | PromptReport


@dataclass(frozen=True, slots=True)
class Info:
    """What an engine is; the same as long as it lives."""

    model: str  # its name
    method: str  # the default
    methods: tuple[str, ...]  # all that may be asked for
    vocab_size: int
    max_context: int
    slots: int
    eos_ids: tuple[int, ...]
    runtime: str = ""
    precision: str = ""
    device: str = "cpu"
    fingerprint: str = ""
    same_bits: bool = False  # whether a resumed text is exactly the text of an unbroken run
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of the model's generation config
    corpora: tuple[Mapping[str, Any], ...] = ()


class EventStream(Protocol):
    """The events of one request. Leaving early (`aclose`) cancels it."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    async def __anext__(self) -> Event: ...
    async def aclose(self) -> None: ...


class EngineLink(Protocol):
    """An engine the front talks to, from one event loop. Nothing here blocks the loop."""

    async def start(self) -> None:
        """Ready after this; `info` may be asked then."""
        ...

    @property
    def info(self) -> Info: ...

    @property
    def ready(self) -> bool:
        """Whether requests are taken now: false while an engine is loaded, and after `close`."""
        ...

    async def submit(self, request: Request) -> EventStream:
        """Queued when this returns. Raises `InputError` for what cannot be run, `FullQueue` and `ClosedEngine`."""
        ...

    async def cancel(self, id: str) -> bool:
        """Takes effect before the next step; the stream ends with `CANCELLED`. False: there is no such request."""
        ...

    async def stats(self) -> Mapping[str, Any]:
        """Counters and gauges; `STATS` says which."""
        ...

    async def slots(self) -> list[Mapping[str, Any]]:
        """What runs and waits, one record a sequence."""
        ...

    async def trace(self, id: str) -> Mapping[str, Any] | None:
        """The document of a request submitted with `trace` (`outrider.explain.document`); None: nothing is known."""
        ...

    async def close(self, seconds: float = 0.0) -> None:
        """Takes no more, lets what runs go on for so long, then cancels it and keeps what drafters learnt."""
        ...


STATS = {
    "running": "sequences with a slot",
    "waiting": "sequences without one",
    "requests": "requests taken since the start",
    "prompt_tokens": "of all prompts",
    "cached_tokens": "of all prompts, found in the cache",
    "new_tokens": "emitted",
    "steps": "of the engine",
    "drafted": "candidates verified",
    "accepted": "candidates that became text",
    "draft_s": "seconds spent drafting",
    "verify_s": "seconds in the target's passes",
    "rest_s": "seconds on the host besides",
    "cache_blocks": "blocks there are; 0: the runtime does not say",
    "cache_blocks_used": "blocks in use",
}
