"""The loop over steps: draft, verify, commit, emit, for one or many sequences at once.

Knows token ids and protocols, nothing concrete. Requests come in from any thread (`core/schedule/` says how), join and
leave between steps, and wait where they do not fit. One thread at a time steps; the others share what it brings.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from outrider.core.errors import ClosedEngine, FullQueue
from outrider.core.generation import FinishReason, Generation
from outrider.core.legality.trim import fitted
from outrider.core.noise import DRAFT, StreamNoise, fresh_seed
from outrider.core.protocols import CompileForm, Constraints, Recipe, Target
from outrider.core.records import Budget, Load, Piece, StepRecord, StepTiming
from outrider.core.rows.judge import judge
from outrider.core.rows.races import races
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import Handle, Listener, StepReport, Terms, Watcher
from outrider.core.schedule.checks import check_prompt, check_tree
from outrider.core.schedule.gate import Gate
from outrider.core.schedule.groups import Group, by_recipe, needs_of
from outrider.core.schedule.guard import Guard
from outrider.core.schedule.outbox import Outbox
from outrider.core.schedule.pace import Pace
from outrider.core.schedule.passes import run_pass
from outrider.core.schedule.roster import Roster
from outrider.core.schedule.side import asked_rows
from outrider.core.schedule.waiting import Waiting
from outrider.core.sequence import Decode, NoiseMaker, Running, StopCheck
from outrider.core.together import acting_late, split, with_form
from outrider.core.tree import TokenTree, root

__all__ = ["Engine", "Handle"]
log = logging.getLogger("outrider")


class Engine:
    """Generates token ids for submitted prompts. `strict` raises a drafter's error instead of going on without it."""

    def __init__(
        self, target: Target, recipe: Recipe, *, eos_ids: Iterable[int] = (), decode: Decode | None = None,
        strict: bool = False, max_queue: int = 4096, make_noise: NoiseMaker = StreamNoise,
        clock: Callable[[], float] | None = None, max_gap_ms: float | None = None,
        compile_form: CompileForm | None = None,
    ) -> None:  # fmt: skip
        self.target, self.recipe, self.decode = target, recipe, decode
        self.guard = Guard(strict)
        self.roster = Roster(target, self.guard)
        self.outbox = Outbox(target)
        self.pace = Pace(max_gap_ms / 1e3 if max_gap_ms is not None else None)
        self.clock = clock or time.perf_counter  # of the steps: what a controller decides by
        self.eos_ids = frozenset(eos_ids)
        self.max_queue, self.make_noise = max_queue, make_noise
        self.compile_form = compile_form  # the automaton of what a request's parameters ask its text to look like
        self.steps = 0  # that ran something
        self.closed = False
        self._gate = Gate()
        self._entry = threading.Lock()  # of what other threads change
        self._inbox: deque[Running] = deque()
        self._live: dict[int, Handle] = {}  # requests that have not ended, by number
        self._numbers = itertools.count(1)
        self._some_cancelled = False
        self._watchers: list[Watcher] = []
        self._tail = 0.0  # seconds the last step spent after its timing was taken; the next step counts them

    # From any thread

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, recipe: Recipe | None = None, *,
        constraint: Constraints | None = None, stop_check: StopCheck | None = None,
        on_token: Callable[[int], None] | None = None, terms: Terms | None = None, listener: Listener | None = None,
    ) -> Handle:  # fmt: skip
        """Queue one prompt (params.n sequences). Nothing runs until `step`."""
        terms = terms or Terms()
        check_prompt(prompt, params, terms, self.target, self.decode is not None)
        seed = fresh_seed() if params.seed is None else params.seed
        if params.seed is None and isinstance(terms.resume_from, Generation):
            seed = terms.resume_from.seed
        reshaping, automaton = split(with_form(params, constraint, self.compile_form))
        number = next(self._numbers)
        sequences = [
            Running(
                prompt, params, recipe or self.recipe, seed, sample, self.eos_ids, self.target.vocab_size,
                self.target.max_context, self.decode, reshaping, automaton, stop_check, on_token, self.make_noise,
                *acting_late(constraint), number, terms, listener,
            )
            for sample in range(terms.sample, terms.sample + params.n)
        ]  # fmt: skip
        handle = Handle(self, number, sequences)
        with self._entry:
            if self.closed:
                raise ClosedEngine("this engine is closed; load a new one")
            if len(self.queue) + len(self._inbox) + params.n > self.max_queue:
                raise FullQueue(f"{self.max_queue} requests are waiting already; take results before submitting more")
            self._inbox.extend(sequences)
            self._live[number] = handle
        self.wake()
        return handle

    def cancel(self, number: int) -> bool:
        """The request leaves before the next step; False where it has ended already."""
        if (handle := self._live.get(number)) is not None:
            handle.cancel()
        return handle is not None

    def wake(self) -> None:
        """Something has changed for threads that wait: a request came, or was cancelled."""
        self._some_cancelled = True
        self._gate.wake()

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Tell it of every step, in the thread that steps. Gives back what ends that."""
        self._watchers = [*self._watchers, watcher]

        def end() -> None:
            self._watchers = [one for one in self._watchers if one is not watcher]

        return end

    @property
    def running(self) -> list[Running]:
        """Those who hold a slot, or share the prompt of one who does."""
        return self.roster.running

    @property
    def queue(self) -> Waiting:
        return self.roster.queue

    @property
    def strict(self) -> bool:
        return self.guard.strict

    @strict.setter
    def strict(self, strict: bool) -> None:
        self.guard.strict = strict

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self.running or self._inbox or len(self.queue))

    def step(self) -> bool:
        """One step of every running sequence; True while there is more to do. Waits while another thread steps."""
        with self._gate.entered():
            try:
                return self._step()
            finally:
                self.outbox.empty()

    def drive(self, reached: Callable[[], bool]) -> None:
        """Step until that is reached, or wait where another thread steps."""
        self._gate.until(reached, self._step)

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Waits until there is something to do; False where that took too long, or the engine was closed."""
        self._gate.wait(lambda: self.busy or self.closed, timeout)
        return self.busy and not self.closed

    def work(self, stop: threading.Event) -> None:
        """Steps while there is something to do, and waits for it: for a thread of its own, until `stop` or `close`."""
        while not stop.is_set() and not self.closed:
            try:
                if self.wait_for_work(0.1):
                    with self._gate.entered():
                        self._step()
                elif not self.closed:
                    with self._gate.entered():
                        self._use_spare_time(idle=True)
            except ClosedEngine:
                return
            except Exception as error:  # everybody was told; those who come next find the engine at work
                log.error("a step failed and ended all requests: %r", error, exc_info=error)
        with self._gate.entered():
            self.outbox.empty()

    def close(self) -> None:
        """Cancel what runs or waits and free the cache. Safe to call twice."""
        with self._gate.entered():
            with self._entry:
                self.closed = True
            self._abandon()

    # In the thread that steps

    def _step(self) -> bool:
        if self.closed:
            raise ClosedEngine("this engine is closed; load a new one")
        roster = self.roster
        try:
            self._take_in()
            roster.admit()
            while roster.running and not (ready := roster.ready()):  # nobody waits for a token
                self._run_prompts(self.target.traits.prompt_rows)
                self._take_in()
                roster.admit()
            if roster.running:
                self._advance(ready)
                self._use_spare_time()
        except BaseException as error:
            self._abandon(error)  # an interrupt leaves clean partial results and free slots
            raise
        finally:
            self._sort_out()
        if not self.busy:
            self.outbox.empty()
        return self.busy

    def _take_in(self) -> None:
        """What other threads asked for since the last step."""
        with self._entry:
            new, self._inbox = self._inbox, deque()
            cancelled, self._some_cancelled = self._some_cancelled, False
        for s in new:
            if s.done:
                self.roster.leave(s, FinishReason.STOP)  # what it was resumed from is complete
            else:
                self.queue.add(s)
        for s in [s for s in (*self.running, *(self.queue if cancelled else ())) if s.cancelled]:
            self.roster.leave(s, FinishReason.ERROR if s.error else FinishReason.CANCELLED)

    def _use_spare_time(self, idle: bool = False) -> None:
        """What the target would like to get ready, apart from the time of steps."""
        if (spare := self.target.traits.spare) is not None:
            spare(idle)

    def _sort_out(self) -> None:
        """Requests that have ended need no number any more."""
        gone, self.roster.gone = self.roster.gone, []
        with self._entry:
            for s in gone:
                if s.request in self._live and self._live[s.request].done:
                    del self._live[s.request]

    def _run_prompts(self, rows: int) -> None:
        """A pass of prompts alone."""
        roster, begun = self.roster, self.clock()
        stretches = roster.stretches(rows)
        if not roster.make_room((), stretches):
            stretches = roster.stretches(rows)
        if not stretches:
            return
        ran = run_pass(self.target, [one.piece for one in stretches], needs_of([one.s for one in stretches]))
        seconds = self.clock() - begun
        self.pace.learn(sum(len(one.piece.tokens) for one in stretches), False, seconds, seconds)
        roster.have_run(stretches, ran)

    def _advance(self, batch: list[Running]) -> None:
        """Plan, draft, size, verify, commit, tell: the whole of speculative decoding."""
        clock, roster = self.clock, self.roster
        rows = self.pace.rows(self.target.traits.prompt_rows, decoding=True)
        stretches = roster.stretches(rows) if self.target.traits.mixes else []
        if not self.target.traits.mixes and roster.stretches(1):
            self._run_prompts(rows)
        if not roster.make_room(batch, stretches):
            batch, stretches = [s for s in batch if s.slot >= 0], [one for one in stretches if one.s.slot >= 0]
        if not batch:
            return
        begun = clock()
        groups, context = by_recipe(batch), sum(self.target.length(s.slot) for s in batch)
        texts = {one.s.slot: len(one.piece.tokens) for one in stretches}
        prompt_rows = sum(texts.values())
        trees = self._draft(batch, groups, context, prompt_rows)
        sides = {slot: rows for group in groups for slot, rows in group.sides.items()}
        asked = races(batch, trees) if self.target.traits.races and not sides else {}
        of_trees = [Piece(s.slot, tree=trees[s.slot], side=sides.get(s.slot), race=asked.get(s.slot)) for s in batch]
        if not self.target.fits({piece.slot: piece.rows for piece in of_trees} | texts):
            of_trees = [Piece(s.slot, tree=root(s.pending)) for s in batch]
        drafted = clock()
        pieces = [*of_trees, *(one.piece for one in stretches)]
        needs = needs_of([*batch, *(one.s for one in stretches)], sided=bool(sides))
        ran = run_pass(self.target, pieces, needs)
        self.outbox.empty()  # if that was not done while the pass ran
        verified = clock()
        of_prompts = self.pace.of_prompts(prompt_rows, verified - drafted) if prompt_rows else 0.0
        trees = {slot: piece.tree for slot, piece in ran.pieces.items() if piece.tree is not None}
        for s in [s for s in batch if s.slot in ran.failed]:
            roster.end(s, ran.failed[s.slot])
        batch = [s for s in batch if s.stays]  # what ran of one that was cancelled meanwhile is dropped
        for group in groups:
            group.members = [s for s in group.members if s.stays]
        records = judge(batch, trees, ran.scores, self.target.traits.pick)
        alive = [s for s in batch if not s.done]
        self.target.commit([s.slot for s in alive], [records[s.slot].verdict.path for s in alive])
        judged = clock()
        for group in groups:
            started = clock()
            drafter, following = group.followers()
            if drafter is not None:
                slots = [s.slot for s in following]
                self.guard.call(following, drafter.observe, slots, [records[slot] for slot in slots])
            group.seconds += clock() - started
        observed = clock()
        timing = StepTiming(
            draft=(drafted - begun) + (observed - judged), verify=verified - drafted - of_prompts,
            rest=judged - verified + self._tail, rows=sum(ran.pieces[slot].rows for slot in trees), batch=len(trees),
            context=context, prompt_rows=prompt_rows, prompts=of_prompts,
        )  # fmt: skip
        self.pace.learn(prompt_rows, True, verified - drafted, timing.total)
        roster.have_run(stretches, ran)
        self._tell(batch, groups, records, timing)
        self._tail = clock() - observed if self.running else 0.0

    def _tell(
        self, batch: Sequence[Running], groups: Sequence[Group], records: Mapping[int, StepRecord], timing: StepTiming
    ) -> None:
        """Statistics, costs, controllers, listeners; those who are done leave."""
        now = self.clock()
        for s in batch:
            s.note(records[s.slot], timing, now)
        for costs in {id(g.recipe.costs): g.recipe.costs for g in groups}.values():
            if costs is not None and batch:  # a row costs about the same whether it is a candidate or of a prompt
                seconds = timing.verify + timing.prompts + timing.rest
                costs.add(timing.rows + timing.prompt_rows, timing.batch, seconds, timing.context)
        for group in groups:
            of_group = [records[s.slot] for s in group.members]
            others = timing.rows - timing.batch - sum(record.tree.candidates for record in of_group)
            told = replace(timing, draft=group.seconds, others=others)
            if of_group:
                group.recipe.controller.observe([s.slot for s in group.members], of_group, told)
        for s in batch:
            self.queue.charge(s, len(records[s.slot].emitted))
            if s.done:
                self.roster.leave(s, s.finish or FinishReason.STOP)
        self.outbox.put(s for s in batch if not s.left)
        self.steps += 1
        preempted, self.roster.preempted = self.roster.preempted, 0
        if self._watchers:
            running, waiting = len(self.running), len(self.queue)
            report = StepReport.of(self.steps, timing, records.values(), running, waiting, preempted)
            for watcher in self._watchers:
                watcher(report)

    def _draft(
        self, batch: list[Running], groups: list[Group], context: int, prompt_rows: int
    ) -> dict[int, TokenTree]:  # fmt: skip
        """The tree of each slot; what one method drafts for its sequences is part of the load for the next one."""
        trees = {s.slot: root(s.pending) for s in batch}
        for group in groups:
            if not group.planned:
                continue
            begun = self.clock()
            load = Load(len(batch), sum(tree.candidates for tree in trees.values()), context, prompt_rows)
            slots, limits = [s.slot for s in group.members], [s.room(self.target.max_rows) for s in group.members]
            wanted = group.recipe.controller.plan(slots, limits, load)
            for s, want, limit in zip(group.members, wanted, limits, strict=True):
                if s.trace is not None:
                    s.trace.plan(want, limit)
            budgets = {slot: want & limit for slot, want, limit in zip(slots, wanted, limits, strict=True)}
            trees |= self._propose(group, budgets, load, begun)
            group.seconds = self.clock() - begun
        return trees

    def _propose(self, group: Group, budgets: dict[int, Budget], load: Load, begun: float) -> dict[int, TokenTree]:
        recipe = group.recipe
        willing = [s for s in group.members if s.drafter is not None and budgets[s.slot]]
        if not willing or recipe.drafter is None:
            return {}
        slots, limits = [s.slot for s in willing], [budgets[s.slot] for s in willing]
        try:
            offered = recipe.drafter.propose(slots, limits, [s.noise(DRAFT) for s in willing])
            proposals = fitted(offered, [s.history for s in willing], limits, recipe.verifier.honours)
            for i, s in enumerate(willing):
                if s.trace is not None:
                    s.trace.offer(proposals, i)
            trees = recipe.controller.size(slots, proposals, limits, load, self.clock() - begun)
            for s, budget, tree in zip(willing, limits, trees, strict=True):
                check_tree(tree, s.pending, budget, self.target.vocab_size, recipe.drafter.name)
            by_slot = dict(zip(slots, trees, strict=True))
            group.sides = asked_rows(recipe.drafter, by_slot, self.target)
            return by_slot
        except Exception as error:  # a drafter may fail, the sequence may not
            for s in willing:
                self.guard.fail(s, error)
            return {}

    def _abandon(self, error: BaseException | None = None) -> None:
        """End everything, whatever drafters say to it."""
        strict, self.strict = self.strict, False
        with self._entry:
            new, self._inbox = self._inbox, deque()
        for s in (*self.running, *self.queue, *new):
            if isinstance(error, Exception):
                s.error = s.error or error
            self.roster.leave(s, FinishReason.CANCELLED)
        self.strict = strict
