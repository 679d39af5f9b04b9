"""What a generation gives back: text, token ids, why it ended, and the statistics every surface shows.

Accepted length means tokens emitted per target step, the target's own token included: plain decoding has 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from outrider.core.records import StepRecord, StepTiming
from outrider.core.trace.trace import Trace


class FinishReason(StrEnum):
    EOS = "eos"  # the model ended its text
    STOP = "stop"  # a stop string or a stop token id of the request
    LENGTH = "length"  # max_new_tokens
    CONTEXT = "context"  # the model's context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # the request could not go on; its result raises the reason


class Origin(NamedTuple):
    """Who brought a token: a drafter's name and the depth in its tree, or the target itself ("", 0)."""

    drafter: str
    depth: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one emitted token, from the target's row at its parent."""

    token: int
    raw: float  # of the unprocessed logits
    processed: float  # after penalties, bans, temperature and truncation
    top: tuple[tuple[int, float, float], ...]  # (token, raw, processed), likeliest first by the raw logits

    def as_dict(self) -> dict[str, Any]:
        top = [{"token": token, "raw": raw, "processed": processed} for token, raw, processed in self.top]
        return {"token": self.token, "raw": self.raw, "processed": self.processed, "top": top}


@dataclass(slots=True)
class Stats:
    """Counted while generating; times are wall-clock seconds of the whole batch's steps this sequence took part in."""

    method: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    drafted: int = 0  # candidate nodes verified
    accepted: int = 0  # candidate nodes that became text
    offered_at: list[int] = field(default_factory=list)  # [d - 1]: steps that offered depth d and accepted depth d - 1
    accepted_at: list[int] = field(default_factory=list)  # [d - 1]: steps that accepted depth d
    by_drafter: dict[str, list[list[int]]] = field(default_factory=dict)  # [d - 1]: those two, where it had a candidate
    queue_s: float = 0.0
    first_token_s: float = 0.0  # from the start of the prefill to the first token
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    drafter_failures: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache when it began
    preemptions: int = 0  # times it was put back to wait, and its text recomputed
    resumed_tokens: int = 0  # of the new ones: those that were said elsewhere, in steps that nobody told

    def count(self, record: StepRecord, timing: StepTiming, emitted: int) -> None:
        """Add one step. `emitted` tokens became text, which may be fewer than were accepted."""
        path = record.verdict.path[:emitted]
        self.steps += 1
        self.new_tokens += emitted
        self.drafted += record.tree.candidates
        self.accepted += len(path)
        self.draft_s += timing.draft
        self.verify_s += timing.verify
        self.rest_s += timing.rest
        if not record.tree.candidates:
            return
        here = 0
        for depth in range(1, record.tree.depth + 1):
            children = record.tree.children(here)
            if not children:
                break
            self._count_drafters(record.tree.origins, children, depth, path)
            if len(self.offered_at) < depth:
                self.offered_at.append(0)
                self.accepted_at.append(0)
            self.offered_at[depth - 1] += 1
            if depth > len(path):
                break
            self.accepted_at[depth - 1] += 1
            here = path[depth - 1]

    def _count_drafters(self, origins: Sequence[str], children: Sequence[int], depth: int, path: Sequence[int]) -> None:
        """What each drafter had at this depth: one of the children at most is accepted."""
        taken = path[depth - 1] if depth <= len(path) else None
        for name in {origins[child] for child in children} if origins else ():
            rows = self.by_drafter.setdefault(name, [])
            rows.extend([0, 0] for _ in range(depth - len(rows)))
            rows[depth - 1][0] += 1
            rows[depth - 1][1] += taken is not None and origins[taken] == name

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.verify_s + self.rest_s

    @property
    def tokens_per_s(self) -> float:
        """Decoding only; the prefill stands apart."""
        return (self.new_tokens - self.resumed_tokens) / self.decode_s if self.decode_s else 0.0

    @property
    def mean_accepted(self) -> float:
        return (self.new_tokens - self.resumed_tokens) / self.steps if self.steps else 0.0

    @property
    def wasted(self) -> int:
        return self.drafted - self.accepted

    @property
    def acceptance_by_depth(self) -> list[float]:
        return [a / o for a, o in zip(self.accepted_at, self.offered_at, strict=True) if o]

    @property
    def host_ms_per_step(self) -> float:
        """Time outside the models: everything but drafting and the target's forward."""
        return 1e3 * self.rest_s / self.steps if self.steps else 0.0

    def add(self, other: Stats) -> None:
        """Pool another generation's counts into this one."""
        for name in ("prompt_tokens", "new_tokens", "steps", "drafted", "accepted", "queue_s", "first_token_s",
                     "draft_s", "verify_s", "rest_s", "drafter_failures", "cached_tokens", "preemptions",
                     "resumed_tokens"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.offered_at, other.offered_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count
        for name, rows in other.by_drafter.items():
            kept = self.by_drafter.setdefault(name, [])
            kept.extend([0, 0] for _ in range(len(rows) - len(kept)))
            for pair, more in zip(kept, rows, strict=False):
                pair[0], pair[1] = pair[0] + more[0], pair[1] + more[1]

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "mean_accepted": self.mean_accepted,
            "acceptance_by_depth": self.acceptance_by_depth,
            "by_drafter": {name: [list(pair) for pair in rows] for name, rows in self.by_drafter.items()},
            "drafted": self.drafted,
            "accepted": self.accepted,
            "wasted": self.wasted,
            "tokens_per_s": self.tokens_per_s,
            "ttft_ms": 1e3 * self.first_token_s,
            "queue_ms": 1e3 * self.queue_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "rest_s": self.rest_s,
            "host_ms_per_step": self.host_ms_per_step,
            "drafter_failures": self.drafter_failures,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "resumed_tokens": self.resumed_tokens,
        }


@dataclass(frozen=True, slots=True)
class Generation:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    sample: int  # which of the n samples of its prompt
    stats: Stats
    origins: list[Origin]  # one a token
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one a token of the prompt, None for the first
    trace: Trace | None = None  # where the request asked for it
    stop: str | int | None = None  # the stop string or the id of the request that ended it
    legal_mass: list[float] | None = None  # under an automaton: what of the model's probability it left, token by token

    @property
    def mean_legal_mass(self) -> float | None:
        """A token's, as a geometric mean: how little the automaton had to bend the model; None: nothing did."""
        if not self.legal_mass:
            return None
        return math.exp(sum(math.log(max(mass, 1e-300)) for mass in self.legal_mass) / len(self.legal_mass))

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": str(self.finish_reason),
            "seed": self.seed,
            "sample": self.sample,
            "stats": self.stats.as_dict(),
            "origins": [{"drafter": o.drafter, "depth": o.depth} for o in self.origins],
        }
        if self.legal_mass is not None:
            out |= {"legal_mass": self.legal_mass, "mean_legal_mass": self.mean_legal_mass}
        for name, found in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if found is not None:
                out[name] = [None if one is None else one.as_dict() for one in found]
        if self.trace is not None:
            out["trace"] = self.trace.as_dict()
        return out


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step brought to one sample of a request. Texts of all deliveries join to the text of the generation."""

    request: int
    sample: int
    token_ids: tuple[int, ...]
    text: str  # that has become certain; less, or more, than these tokens
    origins: tuple[Origin, ...]  # one a token
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token where they were asked for
    generation: Generation | None = None  # with the last delivery: everything, with the reason why it ended
    error: Exception | None = None  # why it could not go on; the last delivery then, too

    @property
    def last(self) -> bool:
        return self.generation is not None


Listener = Callable[[Delivery], None]
