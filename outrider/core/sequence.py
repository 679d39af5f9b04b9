"""One running sequence: its history, its noise, where it must stop, and what it has emitted so far.

Stop ids, stop strings, the length limit and the context's end cut an accepted path exactly where plain decoding would
have stopped; counts and statistics are cut there too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.generation import (
    Delivery,
    FinishReason,
    Generation,
    Listener,
    Origin,
    Stats,
    TokenLogprob,
)
from outrider.core.legal import Legal
from outrider.core.noise import TARGET, StreamNoise
from outrider.core.protocols import Automaton, Bound, Constraint, Drafter, Noise, Predicate, Recipe
from outrider.core.records import Budget, Scores, StepRecord, StepTiming, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.schedule.handle import Terms
from outrider.core.target_rows import TargetRows
from outrider.core.text import TextStream
from outrider.core.trace.trace import Trace
from outrider.core.tree import TokenTree

log = logging.getLogger("outrider")
OF_TARGET = Origin("", 0)
StopCheck = Callable[[NDArray[np.int64]], bool]  # a caller's own criterion over all tokens, asked after each one
Decode = Callable[[Sequence[int]], str]
NoiseMaker = Callable[[int, int, int, int, int], Noise]  # seed, sample, stream, hash of the text, position


@dataclass(slots=True, eq=False)
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
    automaton: Automaton | None = None
    stop_check: StopCheck | None = None
    on_token: Callable[[int], None] | None = None
    make_noise: NoiseMaker = StreamNoise
    bound: Bound | None = None
    predicate: Predicate | None = None
    request: int = 0
    terms: Terms = Terms()
    listener: Listener | None = None

    slot: int = -1
    behind: int = 0  # tokens of the text that are not in the cache, but for the pending one
    leader: Running | None = None  # the sample of the same request whose prompt is run for both
    cancelled: bool = False
    finish: FinishReason | None = None
    ended_by: str | int | None = None  # the stop string, or the id among the request's stop ids
    left: bool = False  # everything has been said and counted
    error: Exception | None = None
    drafter: Drafter | None = None  # None once it failed, or for plain decoding
    history: History = field(init=False)
    text: TextStream | None = field(init=False)
    stats: Stats = field(init=False)
    trace: Trace | None = field(init=False)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    legal_mass: list[float] = field(default_factory=list)  # of each token, where an automaton is followed
    pieces: deque[str] = field(default_factory=deque)
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    _delivered: int = 0  # tokens
    _undelivered: list[str] = field(default_factory=list)  # text
    _said: int = 0  # tokens of the output that are text: all but an id that ended it
    _read: int = 0  # those of them that `text` has been given
    _uncounted: deque[tuple[StepRecord, StepTiming, float]] = field(default_factory=deque)
    _reading: threading.Lock = field(default_factory=threading.Lock)  # readers of other threads ask for text, too

    def __post_init__(self) -> None:
        stop_ids = frozenset(self.params.stop_token_ids)
        self.eos_ids = frozenset() if self.params.ignore_eos else self.eos_ids
        ends, legal = self.eos_ids | stop_ids, None
        if self.automaton is not None:
            legal = Legal(self.automaton, self.prompt, self.vocab_size, ends, stop_ids - self.eos_ids)
        self.history = History(
            self.prompt, self.params, self.vocab_size, ends, self.constraint, legal, self.bound, self.predicate
        )
        decode = self.decode if self.params.skip_special else getattr(self.decode, "whole", self.decode)
        self.text = TextStream(decode, self.params.stop, self.params.include_stop) if decode else None
        self.stats = Stats(method=self.recipe.name, prompt_tokens=len(self.prompt))
        self.trace = Trace() if self.params.trace else None
        self.drafter = self.recipe.drafter
        self._resume()

    def _resume(self) -> None:
        """What was said before counts as if it had been said here."""
        said = self.terms.resume_from
        if isinstance(said, Generation):
            self.stats, self.origins, self.logprobs = deepcopy(said.stats), [*said.origins], [*(said.logprobs or ())]
            self.legal_mass = [*(said.legal_mass or ())]
            said = said.token_ids
        else:
            self.stats.new_tokens = self.stats.resumed_tokens = len(said)
            self.origins = [OF_TARGET] * len(said)
        for token in said:
            if self.done:
                raise InputError(f"resume_from goes on behind the end of its text ({self.finish}); there is no more")
            self.history.append((token,))
            self._check(int(token))
        if len(said):
            self.read()
        self.pieces.clear()
        self._undelivered.clear()
        self._delivered = len(self.history.output)

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def stays(self) -> bool:
        """Whether what a pass brings it is to become text: it has not left, and nobody has cancelled it."""
        return not (self.left or self.cancelled)

    @property
    def pending(self) -> int:
        return self.history.last

    @property
    def text_to_find(self) -> list[int]:
        """What may be in the cache already; nothing where the rows of the prompt are asked for."""
        return [] if self.params.prompt_logprobs is not None else self.history.tokens[:-1].tolist()

    @property
    def largest_only(self) -> bool:
        """Whether only the largest logit of each of the target's rows is needed."""
        p = self.params
        return p.greedy and p.logprobs is None and p.prompt_logprobs is None and not self.history.reshapes()

    def room(self, max_rows: int) -> Budget:
        """How deep a tree can be useful: the path and the target's own token must fit what is left."""
        total = len(self.history)
        left = min(self.params.max_new_tokens - self.history.generated, self.max_context - total)
        return Budget(nodes=max_rows - 1 if left > 1 else 0, depth=left - 1)

    def noise(self, stream: int) -> Noise:
        return self.make_noise(self.seed, self.sample, stream, self.history.hash, len(self.history))

    def rows(self, scores: Scores, tree: TokenTree) -> TargetRows:
        assert scores.logits is not None
        noise = self.noise(TARGET) if self.predicate is not None else None
        return TargetRows(scores.logits, tree, self.history, scores.likeliest, noise, scores.among, scores.raced)

    def emit(self, tree: TokenTree, verdict: Verdict, rows: TargetRows) -> tuple[int, ...]:
        """Append the accepted path and the target's token, up to the first stop; returns what became text."""
        if self.bound is None:
            return self._append(tree, verdict, rows)
        seen = rows.seen(verdict.path, verdict.next_token)  # before the text grows: they are rows behind it
        emitted = self._append(tree, verdict, rows)
        self.bound.observe(seen if self.bound.whole_trees else seen[: len(emitted)])
        return emitted

    def _append(self, tree: TokenTree, verdict: Verdict, rows: TargetRows) -> tuple[int, ...]:
        path = verdict.path
        tokens = (*tree.tokens[list(path)].tolist(), verdict.next_token) if path else (verdict.next_token,)
        if self.history.legal is not None:  # before the text grows: they are rows behind it
            masses = [rows.legal_mass(node) for node in (0, *path)]
        for i, token in enumerate(tokens):
            parent = path[i - 1] if i else 0
            if self.params.logprobs is not None:
                self.logprobs.append(_logprob(rows, parent, token, self.params.logprobs))
            if i < len(path):
                self.origins.append(Origin(tree.origins[path[i]] if tree.origins else "draft", i + 1))
            else:
                self.origins.append(OF_TARGET)
            if self.history.legal is not None:
                self.legal_mass.append(masses[i])
            self.history.append((token,))
            self._check(token)
            if self.on_token is not None:
                self.on_token(token)
            if self.done:
                return tokens[: i + 1]
        return tokens

    def _check(self, token: int) -> None:
        """Whether the text ends with this token, which stands at the end of the output."""
        history, params = self.history, self.params
        if token in self.eos_ids:
            self.finish = FinishReason.EOS
        elif token in params.stop_token_ids:
            self.finish, self.ended_by = FinishReason.STOP, token
        else:
            self._said = history.generated
            if self.text is not None and not self.text.waits:
                self.read()
                if self.text.stopped:
                    self.finish, self.ended_by = FinishReason.STOP, self.text.stop
        if self.finish is not None:
            return
        spent = history.legal is not None and history.legal.exhausted
        if spent or (self.stop_check is not None and self.stop_check(history.tokens)):
            self.finish = FinishReason.STOP
        elif history.generated >= params.max_new_tokens:
            self.finish = FinishReason.LENGTH
        elif len(history) >= self.max_context:
            self.finish = FinishReason.CONTEXT

    def note(self, record: StepRecord, timing: StepTiming, now: float) -> None:
        """Changes state: the step is to be counted, at the latest when somebody looks."""
        self._uncounted.append((record, timing, now))
        if self.trace is not None:  # it is told of the next step's plan before that step runs
            self.count()

    def count(self) -> None:
        """Changes state: steps become part of the statistics, and of the trace where one was asked for."""
        with self._reading:
            while self._uncounted:
                record, timing, now = self._uncounted.popleft()
                emitted, drafts = len(record.emitted), self.recipe.drafter is not None
                self.stats.count(record, timing, emitted)
                self.stats.first_token_s = self.stats.first_token_s or now - self.started
                if self.trace is not None:
                    self.trace.end(
                        record.emitted, timing, self.history.generated - emitted, len(self.history) - emitted,
                        now - self.started, drafts=drafts, failed=drafts and self.drafter is None,
                        costs=self.recipe.costs,
                    )  # fmt: skip

    def close(self, reason: FinishReason) -> None:
        """Flush held-back text. The first reason stands."""
        self.finish = self.finish or reason
        self.read(last=True)

    def read(self, last: bool = False) -> None:
        """Changes state: what was said is decoded, the `last` of it too. From any thread.

        Without stop strings nobody needs a text before somebody asks for it.
        """
        if self.text is None or (self._read == self._said and not last):
            return
        with self._reading:
            said = self._said
            try:
                for piece in (self.text.extend(self.history.output[self._read : said]), last and self.text.finish()):
                    if piece:
                        self._show(piece)
            except Exception as error:  # of its tokenizer: it ends before the next step
                self.error, self.cancelled = self.error or error, True
            self._read = said

    def _show(self, piece: str) -> None:
        self.pieces.append(piece)
        if self.listener is not None:
            self._undelivered.append(piece)

    def deliver(self) -> None:
        """Tells the listener what is new, and counts it. One that fails ends the request."""
        self.count()
        if self.listener is None:
            return
        self.read()
        with self._reading:
            text = "".join(self._undelivered)
            self._undelivered.clear()
        first = self._delivered
        new = tuple(self.history.output[first:])
        if not new and not text and not self.left:
            return
        self._delivered = len(self.history.output)
        logprobs = tuple(self.logprobs[len(self.logprobs) - len(new) :]) if self.params.logprobs is not None else ()
        end = self.generation() if self.left else None
        try:
            self.listener(
                Delivery(self.request, self.sample, new, text, tuple(self.origins[first:]), logprobs, end, self.error)
            )
        except Exception as error:
            log.warning("the listener of request %d failed; the request ends: %r", self.request, error)
            self.listener, self.cancelled, self.error = None, True, self.error or error

    def generation(self) -> Generation:
        """As it is now: later steps do not change it."""
        self.count()
        self.read()
        return Generation(
            text=self.text.text if self.text else "",
            token_ids=list(self.history.output),
            finish_reason=self.finish or FinishReason.CANCELLED,
            seed=self.seed,
            sample=self.sample,
            stats=deepcopy(self.stats),
            origins=[*self.origins],
            legal_mass=[*self.legal_mass] if self.history.legal is not None else None,
            logprobs=[*self.logprobs] if self.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
            trace=self.trace,
            stop=self.ended_by,
        )


def _logprob(rows: TargetRows, node: int, token: int, count: int) -> TokenLogprob:
    raw, processed = rows.logprobs(node)
    top = torch.topk(raw, min(count, raw.numel())).indices.tolist() if count else []
    return TokenLogprob(
        token, float(raw[token]), float(processed[token]), tuple((i, float(raw[i]), float(processed[i])) for i in top)
    )
