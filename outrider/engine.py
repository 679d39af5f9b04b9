"""The loop over steps: draft, verify, commit, emit, for one or many sequences at once.

Knows token ids and protocols, nothing concrete. Requests join and leave between steps; what does not fit waits in a
queue. One thread at a time: a second one gets a clear error instead of a corrupted cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from outrider.errors import BusyEngine, ClosedEngine, InputError, OutriderError
from outrider.generation import FinishReason, Generation
from outrider.noise import DRAFT, VERIFY, StreamNoise, fresh_seed
from outrider.protocols import (
    Budget,
    Chunk,
    Constraint,
    Load,
    Needs,
    Recipe,
    Scores,
    StepRecord,
    StepTiming,
    Target,
    Verdict,
)  # fmt: skip
from outrider.sampling import SamplingParams
from outrider.sequence import Decode, NoiseMaker, Running, StopCheck
from outrider.tree import TokenTree, root

log = logging.getLogger("outrider")


class Engine:
    """Generates token ids for submitted prompts. `strict` raises a drafter's error instead of going on without it."""

    def __init__(
        self, target: Target, recipe: Recipe, *, eos_ids: Iterable[int] = (), decode: Decode | None = None,
        strict: bool = False, max_queue: int = 4096, make_noise: NoiseMaker = StreamNoise,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self.target, self.recipe, self.decode, self.strict = target, recipe, decode, strict
        self.clock = clock or time.perf_counter  # of the steps: what a controller decides by
        self.eos_ids = frozenset(eos_ids)
        self.max_queue, self.make_noise = max_queue, make_noise
        self.queue: deque[Running] = deque()
        self.running: list[Running] = []
        self.closed = False
        self._turn = threading.Lock()
        self._logged: set[str] = set()
        self._tail = 0.0  # seconds the last step spent after its timing was taken; the next step counts them

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, recipe: Recipe | None = None, *,
        constraint: Constraint | None = None, stop_check: StopCheck | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Handle:  # fmt: skip
        """Queue one prompt (params.n sequences). Nothing runs until `step`."""
        with self._exclusive():
            self._check_prompt(prompt, params)
            seed = fresh_seed() if params.seed is None else params.seed
            sequences = [
                Running(
                    prompt, params, recipe or self.recipe, seed, sample, self.eos_ids, self.target.vocab_size,
                    self.target.max_context, self.decode, constraint, stop_check, on_token, self.make_noise,
                )
                for sample in range(params.n)
            ]  # fmt: skip
            self.queue.extend(sequences)
            return Handle(self, sequences)

    def step(self) -> bool:
        """One step of every running sequence; True while there is more to do."""
        with self._exclusive():
            try:
                self._drop_cancelled()
                self._admit()
                if self.running:
                    self._advance(self.running)
            except BaseException:
                self._abandon()  # an interrupt or a failed forward leaves clean partial results and free slots
                raise
            return bool(self.running or self.queue)

    def close(self) -> None:
        """Cancel what runs or waits and free the cache. Safe to call twice."""
        with self._exclusive(closing=True):
            self._abandon()
            self.closed = True

    def _advance(self, batch: list[Running]) -> None:
        """Plan, draft, size, verify, commit, tell: the whole of speculative decoding."""
        clock = self.clock
        begun = clock()
        groups = _by_recipe(batch)
        trees = self._draft(batch, groups)
        drafted = clock()
        scores = self.target.verify([s.slot for s in batch], [trees[s.slot] for s in batch], _needs(batch))
        verified = clock()
        records = {s.slot: self._judge(s, trees[s.slot], own) for s, own in zip(batch, scores, strict=True)}
        alive = [s for s in batch if not s.done]
        self.target.commit([s.slot for s in alive], [records[s.slot].verdict.path for s in alive])
        judged = clock()
        for group in groups:
            started = clock()
            for s in group.members:
                if s.drafter is not None:
                    self._guard(s, s.drafter.observe, s.slot, records[s.slot])
            group.seconds += clock() - started
        observed = clock()
        timing = StepTiming(
            draft=(drafted - begun) + (observed - judged), verify=verified - drafted,
            rest=judged - verified + self._tail, rows=sum(map(len, trees.values())), batch=len(batch),
        )  # fmt: skip
        for s in batch:
            s.stats.count(records[s.slot], timing, len(records[s.slot].emitted))
            s.stats.first_token_s = s.stats.first_token_s or clock() - s.started
        for costs in {id(g.recipe.costs): g.recipe.costs for g in groups}.values():
            if costs is not None:
                costs.add(timing.rows, timing.batch, timing.verify + timing.rest)
        for group in groups:
            own = [records[s.slot] for s in group.members]
            others = timing.rows - timing.batch - sum(record.tree.candidates for record in own)
            told = replace(timing, draft=group.seconds, others=others)
            group.recipe.controller.observe([s.slot for s in group.members], own, told)
        for s in [s for s in batch if s.done]:
            self._leave(s, s.finish or FinishReason.STOP)
        self._tail = clock() - observed if self.running else 0.0

    def _draft(self, batch: list[Running], groups: list[_Group]) -> dict[int, TokenTree]:
        """The tree of each slot; what one method drafts for its sequences is part of the load for the next one."""
        trees = {s.slot: root(s.pending) for s in batch}
        for group in groups:
            begun = self.clock()
            load = Load(len(batch), sum(tree.candidates for tree in trees.values()))
            slots, limits = [s.slot for s in group.members], [s.room(self.target.max_rows) for s in group.members]
            wanted = group.recipe.controller.plan(slots, limits, load)
            budgets = {slot: want & limit for slot, want, limit in zip(slots, wanted, limits, strict=True)}
            trees |= self._propose(group, budgets, load, begun)
            group.seconds = self.clock() - begun
        return trees

    def _propose(self, group: _Group, budgets: dict[int, Budget], load: Load, begun: float) -> dict[int, TokenTree]:
        recipe = group.recipe
        willing = [s for s in group.members if s.drafter is not None and budgets[s.slot]]
        if not willing or recipe.drafter is None:
            return {}
        slots, own = [s.slot for s in willing], [budgets[s.slot] for s in willing]
        try:
            proposals = recipe.drafter.propose(slots, own, [s.noise(DRAFT) for s in willing])
            trees = recipe.controller.size(slots, proposals, own, load, self.clock() - begun)
            for s, budget, tree in zip(willing, own, trees, strict=True):
                _check_tree(tree, s.pending, budget, self.target.vocab_size, recipe.drafter.name)
            return dict(zip(slots, trees, strict=True))
        except Exception as error:  # a drafter may fail, the sequence may not
            for s in willing:
                self._fail(s, error)
            return {}

    def _judge(self, s: Running, tree: TokenTree, scores: Scores) -> StepRecord:
        try:
            rows = s.rows(scores, tree)
            verdict = s.recipe.verifier.verify(tree, rows, s.noise(VERIFY))
            emitted = s.emit(tree, verdict, rows)
        except OutriderError as error:  # one request's impossible demand must not end the others
            s.error, s.finish = error, FinishReason.ERROR
            verdict, emitted = Verdict((), s.pending), ()
        return StepRecord(tree, verdict, emitted, scores)

    def _admit(self) -> None:
        """Move waiting sequences into free slots and run their prompts; samples of one prompt share its prefix."""
        joining: list[Running] = []
        while self.queue and len(joining) < self.target.free_slots:
            joining.append(self.queue.popleft())
        for s in joining:
            s.started = time.perf_counter()
            s.stats.queue_s = s.started - s.submitted
        for group in _same_prompt(joining):
            self._prefill(group)

    def _prefill(self, group: list[Running]) -> None:
        first, needs = group[0], _needs(group)
        first.slot = self.target.acquire()
        self.running.append(first)
        stream = self.target.prefill([first.slot], [first.prompt], needs)
        self._begin(first, (chunk for chunks in stream for chunk in chunks))
        for _ in stream:  # a drafter that looked at nothing, or failed, must not leave the prompt half run
            pass
        for s in group[1:]:
            s.slot = self.target.fork(first.slot)
            self.running.append(s)
            self._begin(s, ())

    def _begin(self, s: Running, chunks: Iterable[Chunk]) -> None:
        s.recipe.controller.begin(s.slot)
        if s.drafter is not None:
            self._guard(s, s.drafter.begin, s.slot, s.history, chunks)

    def _leave(self, s: Running, reason: FinishReason) -> None:
        s.close(reason)
        slot, s.slot = s.slot, -1
        if slot < 0:
            return
        self.running.remove(s)
        self.target.release(slot)
        s.recipe.controller.end(slot)
        if s.drafter is not None:
            self._guard(s, s.drafter.end, slot)

    def _drop_cancelled(self) -> None:
        for s in [s for s in (*self.running, *self.queue) if s.cancelled]:
            self._leave(s, FinishReason.CANCELLED)
        self.queue = deque(s for s in self.queue if not s.done)

    def _abandon(self) -> None:
        """End everything, whatever drafters say to it."""
        strict, self.strict = self.strict, False
        for s in (*self.running, *self.queue):
            s.cancelled = True
        self._drop_cancelled()
        self.strict = strict

    def _guard(self, s: Running, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:
            self._fail(s, error)

    def _fail(self, s: Running, error: Exception) -> None:
        if self.strict:
            raise error
        name = s.recipe.name
        if name not in self._logged:
            self._logged.add(name)
            log.warning("drafter of %s failed, going on without it: %r", name, error, exc_info=error)
        s.stats.drafter_failures += 1
        failed, s.drafter = s.drafter, None
        if failed is not None:
            try:
                failed.end(s.slot)
            except Exception:
                log.debug("drafter of %s could not end a failed sequence", name, exc_info=True)

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if len(prompt) == 0:
            raise InputError("the prompt is empty; give at least one token")
        if len(prompt) >= self.target.max_context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens but the context holds {self.target.max_context}; "
                "shorten it or load with a larger max_context"
            )
        if min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
            raise InputError(f"the prompt has token ids outside 0..{self.target.vocab_size - 1}; check the tokenizer")
        if params.stop and self.decode is None:
            raise InputError("stop strings need a tokenizer; give stop_token_ids or load the model with its tokenizer")
        if len(self.queue) + params.n > self.max_queue:
            raise OutriderError(f"{self.max_queue} requests are waiting already; take results before submitting more")

    @contextmanager
    def _exclusive(self, closing: bool = False) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise BusyEngine("this engine is working for another thread or call; use one engine a thread, or wait")
        try:
            if self.closed and not closing:
                raise ClosedEngine("this engine is closed; load a new one")
            yield
        finally:
            self._turn.release()


class Handle:
    """A submitted request. `cancel` may be called from any thread; it takes effect before the next step."""

    def __init__(self, engine: Engine, sequences: list[Running]) -> None:
        self.engine, self.sequences = engine, sequences

    @property
    def done(self) -> bool:
        return all(s.done for s in self.sequences)

    @property
    def ready(self) -> bool:
        """Whether there is new text of the first sample, or an end."""
        return self.done or bool(self.sequences[0].pieces)

    def cancel(self) -> None:
        for s in self.sequences:
            s.cancelled = True

    def results(self) -> list[Generation]:
        """One generation a sample; steps the engine until they are there."""
        while not self.done:
            self.engine.step()
        for s in self.sequences:
            if s.error is not None:
                raise s.error
        return [s.generation() for s in self.sequences]

    def result(self) -> Generation:
        return self.results()[0]

    def partial(self) -> list[Generation]:
        """What has been emitted so far, without running anything."""
        return [s.generation() for s in self.sequences]

    def new_text(self) -> str:
        """Text of the first sample that has become safe since the last call, without running anything."""
        pieces, out = self.sequences[0].pieces, []
        while pieces:
            out.append(pieces.popleft())
        return "".join(out)

    def pieces(self) -> Generator[str]:
        """Text of the first sample as it comes; stopping early cancels the request."""
        try:
            while True:
                if piece := self.new_text():
                    yield piece
                elif self.done:
                    self.results()  # raises what ended the request, if it was an error
                    return
                else:
                    self.engine.step()
        finally:
            self.cancel()


@dataclass(slots=True)
class _Group:
    """The sequences of one method in a step, and the seconds it took to draft for them."""

    recipe: Recipe
    members: list[Running]
    seconds: float = 0.0


def _by_recipe(batch: list[Running]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for s in batch:
        groups.setdefault(id(s.recipe), _Group(s.recipe, [])).members.append(s)
    return list(groups.values())


def _same_prompt(joining: list[Running]) -> list[list[Running]]:
    """Samples of one request together, where the drafter does not need the prompt's scores for itself."""
    groups: list[list[Running]] = []
    for s in joining:
        shared = groups and groups[-1][0].prompt is s.prompt and _needs([s]) == Needs()
        if shared:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _needs(batch: list[Running]) -> Needs:
    needs = Needs()
    for s in batch:
        if s.drafter is not None:
            needs |= s.drafter.needs
    return replace(needs, rounded=all(s.largest_only for s in batch))


def _check_tree(tree: TokenTree, pending: int, budget: Budget, vocab_size: int, name: str) -> None:
    if tree.tokens[0] != pending:
        raise OutriderError(f"{name} proposed a tree that does not hang on the pending token")
    if tree.candidates > budget.nodes or tree.depth > budget.depth:
        raise OutriderError(f"{name} proposed {tree.candidates} nodes, {tree.depth} deep, over its budget {budget}")
    if tree.candidates and not (tree.tokens.min() >= 0 and tree.tokens.max() < vocab_size):
        raise OutriderError(f"{name} proposed token ids outside 0..{vocab_size - 1}")
