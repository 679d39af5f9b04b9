"""Running jobs through the engine under test: the method as configured, always speculating, and with forced drafters.

A forced drafter replays plain decoding's own answer and errs on purpose, among wrong siblings, so that every branch of
verification and commit runs for many steps however seldom the method itself is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.check.reference import Answer, Job, Plain, Watch
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine, Handle
from outrider.core.generation import Generation
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Drafter, Noise, Recipe
from outrider.core.records import Budget, Chunk, Scores, StepRecord
from outrider.draft.forced import Forced
from outrider.verify.invariant import Invariant

NODES = 8  # candidates a step where the method has no option budget
FORCED_NODES, FORCED_DEPTH = 12, 4
FORCED = (("accept-all", 1.0, 1), ("random-accept", 0.6, 2), ("accept-none", 0.0, 1))  # name, acceptance, decoys


@dataclass(frozen=True, slots=True)
class Subject:
    """The method under test in its engine, and the unmodified model it must agree with."""

    engine: Engine
    recipe: Recipe
    plain: Plain

    def speculating(self, nodes: int | None = None) -> Recipe:
        """The method with its whole budget, or less, at every step: a controller that goes quiet would prove little."""
        named = getattr(self.recipe.options, "budget", NODES)
        whole = named if isinstance(named, int) else NODES
        nodes = min(whole, nodes or whole)
        depth = min(nodes, int(getattr(self.recipe.options, "depth", nodes)))
        return dataclasses.replace(self.recipe, controller=Fixed(Budget(nodes, depth)))

    @property
    def speculates(self) -> bool:
        return self.recipe.drafter is not None

    def forced(self, answer: Answer, accept: float, decoys: int) -> Recipe:
        """The method's rule on a tree that replays this answer. One recipe a text, since each has its own answer."""
        drafter = Forced(lambda context: answer.tokens, self.plain.vocab_size, accept, decoys)
        budget = Fixed(Budget(FORCED_NODES, FORCED_DEPTH))
        return Recipe("forced", drafter, self.recipe.verifier, budget)

    def plain_decoding(self) -> Recipe:
        return Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


def together(engine: Engine, pairs: Sequence[tuple[Job, Recipe]], label: str, watch: Watch) -> list[Generation]:
    """One ragged batch: requests queue, join and leave between steps. Results in the order of `pairs`."""
    handles = [engine.submit(job.prompt, job.params, recipe) for job, recipe in pairs]
    finish(engine, handles, label, watch)
    return [handle.result() for handle in handles]


def finish(engine: Engine, handles: Sequence[Handle], label: str, watch: Watch) -> None:
    made = 0
    try:
        while not all(handle.done for handle in handles):
            engine.step()
            now = sum(len(s.history.output) for handle in handles for s in handle.sequences)
            watch(label, now - made)
            made = now
    finally:
        for handle in handles:  # an interrupt leaves nothing running
            handle.cancel()


def one_by_one(engine: Engine, pairs: Sequence[tuple[Job, Recipe]], label: str, watch: Watch) -> list[Generation]:
    return [together(engine, [pair], label, watch)[0] for pair in pairs]


def shortened(answers: Sequence[Answer], longest: int) -> list[tuple[Job, list[int]]]:
    """Jobs of different lengths, none above `longest`, so that sequences leave a batch at different steps.

    Each also predicts its answer, less every seventh token: a drafter that uses predictions is right most of the time
    and must find its place again after each gap.
    """
    out = []
    for i, answer in enumerate(answers):
        length = max(1, min(longest, len(answer.tokens)) - i % 4)
        if len(answer.tokens) < min(longest, answer.job.params.max_new_tokens):  # it ended: an end may be drafted, too
            length = longest
        prediction = tuple(token for place, token in enumerate(answer.tokens, 1) if place % 7)
        params = answer.job.params.with_(max_new_tokens=length, min_new_tokens=0, prediction=prediction)
        out.append((dataclasses.replace(answer.job, params=params), answer.tokens[:length]))
    return out


def told(made: Sequence[Generation]) -> tuple[list[list[int]], int, int]:
    """What a comparison is told of a run: its texts, its steps, and the candidates that were verified."""
    return [g.token_ids for g in made], sum(g.stats.steps for g in made), sum(g.stats.drafted for g in made)


class Recorder:
    """A drafter that behaves as the one it holds and notes each step's tree and verdict, by sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.needs, self.shared_noise = drafter.name, drafter.needs, drafter.shared_noise
        self._steps: dict[int, list[StepRecord]] = {}  # by slot, of the sequence that is or was last in it
        self._seen: list[tuple[Context, list[StepRecord]]] = []

    def steps_of(self, context: Context) -> list[StepRecord]:
        return next(steps for seen, steps in self._seen if seen is context)

    def begin(self, slot: int, context: Context) -> None:
        self._steps[slot] = []
        self._seen.append((context, self._steps[slot]))
        self._drafter.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self._drafter.absorb(chunks)

    def end(self, slot: int) -> None:
        self._drafter.end(slot)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        return self._drafter.propose(slots, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        for slot, record in zip(slots, records, strict=True):
            self._steps[slot].append(dataclasses.replace(record, scores=Scores(None)))  # the rows are large
        self._drafter.observe(slots, records)
