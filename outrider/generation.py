"""What a generation gives back: text, token ids, why it ended, and the statistics every surface shows.

Accepted length means tokens emitted per target step, the target's own token included: plain decoding has 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from outrider.protocols import StepRecord, StepTiming


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
    top: tuple[tuple[int, float, float], ...]  # (token, raw, processed), likeliest first by the raw law


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
    queue_s: float = 0.0
    first_token_s: float = 0.0  # from the start of the prefill to the first token
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    drafter_failures: int = 0

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
        here = 0
        for depth in range(1, record.tree.depth + 1):
            if not (record.tree.parents == here).any():
                break
            if len(self.offered_at) < depth:
                self.offered_at.append(0)
                self.accepted_at.append(0)
            self.offered_at[depth - 1] += 1
            if depth > len(path):
                break
            self.accepted_at[depth - 1] += 1
            here = path[depth - 1]

    @property
    def decode_s(self) -> float:
        return self.draft_s + self.verify_s + self.rest_s

    @property
    def tokens_per_s(self) -> float:
        """Decoding only; the prefill stands apart."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def mean_accepted(self) -> float:
        return self.new_tokens / self.steps if self.steps else 0.0

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
                     "draft_s", "verify_s", "rest_s", "drafter_failures"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.offered_at, other.offered_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "mean_accepted": self.mean_accepted,
            "acceptance_by_depth": self.acceptance_by_depth,
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
        if self.logprobs is not None:
            out["logprobs"] = [
                {"token": t.token, "raw": t.raw, "processed": t.processed,
                 "top": [{"token": i, "raw": r, "processed": p} for i, r, p in t.top]}
                for t in self.logprobs
            ]  # fmt: skip
        return out
