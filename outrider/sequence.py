"""One running sequence: its history, its noise, where it must stop, and what it has emitted so far.

Stop ids, stop strings, the length limit and the context's end cut an accepted path exactly where plain decoding would
have stopped; counts and statistics are cut there too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.generation import FinishReason, Generation, Origin, Stats, TokenLogprob
from outrider.noise import StreamNoise
from outrider.protocols import Budget, Constraint, Drafter, Noise, Recipe, Scores, Verdict
from outrider.sampling import History, SamplingParams, TargetRows
from outrider.text import TextStream
from outrider.tree import TokenTree

StopCheck = Callable[[NDArray[np.int64]], bool]  # a caller's own criterion over all tokens, asked after each one
Decode = Callable[[Sequence[int]], str]
NoiseMaker = Callable[[int, int, int, int, int], Noise]  # seed, sample, stream, hash of the text, position


@dataclass(slots=True)
class Running:
    """Changes state in `emit` and `finish` only."""

    prompt: Sequence[int]
    params: SamplingParams
    recipe: Recipe
    seed: int
    sample: int
    eos_ids: frozenset[int]
    vocab_size: int
    max_context: int
    decode: Decode | None = None
    constraint: Constraint | None = None
    stop_check: StopCheck | None = None
    on_token: Callable[[int], None] | None = None
    make_noise: NoiseMaker = StreamNoise

    slot: int = -1
    cancelled: bool = False
    finish: FinishReason | None = None
    error: OutriderError | None = None
    drafter: Drafter | None = None  # None once it failed, or for plain decoding
    history: History = field(init=False)
    text: TextStream | None = field(init=False)
    stats: Stats = field(init=False)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: deque[str] = field(default_factory=deque)
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0

    def __post_init__(self) -> None:
        own = frozenset(self.params.stop_token_ids)
        self.eos_ids = frozenset() if self.params.ignore_eos else self.eos_ids
        self.history = History(self.prompt, self.params, self.vocab_size, self.eos_ids | own, self.constraint)
        self.text = TextStream(self.decode, self.params.stop) if self.decode else None
        self.stats = Stats(method=self.recipe.name, prompt_tokens=len(self.prompt))
        self.drafter = self.recipe.drafter

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def pending(self) -> int:
        return int(self.history.tokens[-1])

    @property
    def largest_only(self) -> bool:
        """Whether of each of the target's rows only the largest logit is looked at."""
        return self.params.greedy and self.params.logprobs is None and not self.history.reshapes()

    def room(self, max_rows: int) -> Budget:
        """How deep a tree can be useful: the path and the target's own token must fit what is left."""
        total = len(self.history.tokens)
        left = min(self.params.max_new_tokens - self.history.generated, self.max_context - total)
        return Budget(nodes=max_rows - 1 if left > 1 else 0, depth=left - 1)

    def noise(self, stream: int) -> Noise:
        return self.make_noise(self.seed, self.sample, stream, self.history.hash, len(self.history.tokens))

    def rows(self, scores: Scores, tree: TokenTree) -> TargetRows:
        assert scores.logits is not None
        return TargetRows(scores.logits, tree, self.history, scores.likeliest)

    def emit(self, tree: TokenTree, verdict: Verdict, rows: TargetRows) -> tuple[int, ...]:
        """Append the accepted path and the target's token, up to the first stop; returns what became text."""
        path = verdict.path
        tokens = (*(int(tree.tokens[node]) for node in path), verdict.next_token)
        for i, token in enumerate(tokens):
            parent = path[i - 1] if i else 0
            if self.params.logprobs is not None:
                self.logprobs.append(_logprob(rows, parent, token, self.params.logprobs))
            name = (tree.origins[path[i]] if tree.origins else "draft") if i < len(path) else ""
            self.origins.append(Origin(name, i + 1 if i < len(path) else 0))
            self.history.append((token,))
            self._check(token)
            if self.on_token is not None:
                self.on_token(token)
            if self.done:
                return tokens[: i + 1]
        return tokens

    def _check(self, token: int) -> None:
        if token in self.eos_ids:
            self.finish = FinishReason.EOS
        elif token in self.params.stop_token_ids:
            self.finish = FinishReason.STOP
        elif self.text is not None:
            if piece := self.text.push(token):
                self.pieces.append(piece)
            if self.text.stopped:
                self.finish = FinishReason.STOP
        if self.finish is None and self.stop_check is not None and self.stop_check(self.history.tokens):
            self.finish = FinishReason.STOP
        if self.finish is None and self.history.generated >= self.params.max_new_tokens:
            self.finish = FinishReason.LENGTH
        if self.finish is None and len(self.history.tokens) >= self.max_context:
            self.finish = FinishReason.CONTEXT

    def close(self, reason: FinishReason) -> None:
        """Flush held-back text. The first reason stands."""
        self.finish = self.finish or reason
        if self.text is not None and (last := self.text.finish()):
            self.pieces.append(last)

    def generation(self) -> Generation:
        return Generation(
            text=self.text.text if self.text else "",
            token_ids=list(self.history.output),
            finish_reason=self.finish or FinishReason.CANCELLED,
            seed=self.seed,
            sample=self.sample,
            stats=self.stats,
            origins=self.origins,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
        )


def _logprob(rows: TargetRows, node: int, token: int, count: int) -> TokenLogprob:
    raw, processed = rows.logprobs(node)
    top = torch.topk(raw, min(count, raw.numel())).indices.tolist() if count else []
    return TokenLogprob(
        token, float(raw[token]), float(processed[token]), tuple((i, float(raw[i]), float(processed[i])) for i in top)
    )
