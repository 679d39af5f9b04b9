"""On-line adaptation: a drafter that goes on learning from what verification shows it, while it is in use.

arXiv 2310.07177, for EAGLE-3 heads; draft models of another vocabulary learn as `hybrid` says. Lossless at every
moment: only proposals change, and a rule uses the distribution that a token was really drawn from. Positions where a
proposal fell count most; those that stood count a little, so that they are not forgotten. An update happens in a
thread (or between requests), on a copy. It takes the drafter's place between two steps unless it is worse on verified
text that it has not learnt from, and is taken back if it is worse on what comes afterwards. Old and new are measured
on the same text, so that a change of domain is not taken for a bad update. Keys and values that a running sequence has
from the old weights stay: that costs acceptance, never exactness.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.layer_driver import LayerDriver
from outrider.core.protocols import Context, Source
from outrider.core.records import Chunk, Scores, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.grown import Grown
from outrider.draft.model.cross_vocabulary import CrossVocabulary
from outrider.models.drafts import CARD, packed, read_card, write_drafter
from outrider.models.kept import find_drafter
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.models.trained import load_eagle3
from outrider.train.online.buffer import Corrections, Stretch, context_rows, joined, verified_rows
from outrider.train.online.hybrid import HybridAdapting
from outrider.train.online.student import AdaptPlan as AdaptPlan
from outrider.train.online.student import Student, check_plan, is_worse, judge
from outrider.train.online.update import UPDATES, Update

log = logging.getLogger("outrider")
KIND = "eagle3"


@dataclass(slots=True)
class _Seat:
    context: Context
    stretches: list[Stretch]
    count: int = 0  # of all these rows
    fresh: int = 0  # of those that carry something to learn


class Adapting:
    """A source in front of an EAGLE-3 source: hands everything on, keeps what was verified, changes its network."""

    def __init__(self, inner: Eagle3Source, plan: AdaptPlan) -> None:
        self.inner, self.plan = inner, plan
        self.name, self.needs = inner.name, inner.needs
        self.buffer = Corrections(plan.bytes)
        self.updates: list[Update] = []  # the newest
        self.outcomes: Counter[str] = Counter()
        self.changed: Callable[[], None] = _nothing  # called in the thread when another network is offered
        self.rows = 0  # verified ones seen
        self.taught = 0  # of them, when the last update began
        self._judged = 0  # stretches that were there when the last update began
        self._seats: dict[int, _Seat] = {}
        self._before: Eagle3Layer | None = None  # what the network in use replaced, until it has proved itself
        self._next: LayerDriver | None = None  # of the network that comes next
        self._student: Student | None = None
        self._thread: threading.Thread | None = None
        self._noise = torch.Generator().manual_seed(plan.seed)
        self._broken = False
        self.clock = time.monotonic
        self._rests_until = 0.0  # of the clock: updates are to take a share of the time only

    @property
    def net(self) -> Eagle3Layer:
        """The network in use."""
        return cast(Eagle3Layer, self.inner.driver.net)

    @property
    def nbytes(self) -> int:
        """Of what is kept to learn from."""
        return self.buffer.nbytes

    @property
    def newest(self) -> Eagle3Layer:
        """The one in use, or that will be in the next step."""
        made = self._next
        return self.net if made is None else cast(Eagle3Layer, made.net)

    def layered(self) -> Eagle3Source:
        """Changes state: the source itself, for who drafts with it beside this one, with the newest network."""
        self._swap()
        return self.inner

    def resume(self, net: Eagle3Layer) -> None:
        """Changes state: goes on from this network, which was learnt before, with the next step."""
        self._offer(net, None)

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = _Seat(context, [])
        self.inner.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """Changes state: the end of what ran is kept as context of what will be verified behind it."""
        for chunk in chunks:
            tokens = torch.tensor(chunk.tokens[-self.plan.context :])
            features = self._features(chunk.scores)[-len(tokens) :]
            seat = self._seats[chunk.slot]
            self._keep(seat, context_rows(tokens, features, self._top))
            self._trim(seat)
        self.inner.absorb(chunks)

    def end(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None and seat.fresh:
            self.buffer.add(joined(seat.stretches))
        self.inner.end(slot)
        if not self.plan.background and not self._seats and self._due:
            self._update()

    def start(self, slots: Sequence[int]) -> list[QRow]:
        self._swap()
        return self.inner.start(slots)

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return self.inner.extend(slots, trees, done)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.inner.observe(slots, records)
        for slot, record in zip(slots, records, strict=True):
            self._note_verified(slot, record)
        if self.plan.background and self._due and self._thread is None and self.clock() >= self._rests_until:
            self._thread = threading.Thread(target=self._update, name="outrider-adapt", daemon=True)
            self._thread.start()

    def _note_verified(self, slot: int, record: StepRecord) -> None:
        """Changes state: the rows that became text wait to be learnt from, a stretch at a time."""
        rows = [0, *record.verdict.path][: len(record.emitted)]
        if not rows or record.scores.logits is None or self._broken:
            return
        seat, tree = self._seats[slot], record.tree
        fell = len(rows) == len(record.verdict.path) + 1 and bool(tree.draws[rows[-1]])
        weights = torch.full((len(rows),), self.plan.stood)
        weights[-1] = 1.0 if fell else self.plan.stood
        features = self._features(record.scores)[rows]
        self._keep(seat, verified_rows(
            torch.from_numpy(tree.tokens[rows]), features, record.scores.logits[rows], self.net.ids, weights, self._top
        ))  # fmt: skip
        seat.fresh += len(rows)
        self.rows += len(rows)
        if seat.count >= self.plan.length:
            whole = joined(seat.stretches)
            self.buffer.add(whole)
            seat.stretches, seat.count, seat.fresh = [whole[-self.plan.context :].silent()], self.plan.context, 0

    def close(self) -> None:
        """Ends the thread after the update it is at; takes over what it made."""
        if (thread := self._thread) is not None:
            thread.join()
        self._swap()

    @property
    def failed(self) -> bool:
        return self._broken

    @property
    def _top(self) -> int:
        return min(self.plan.top, self.net.shape.vocab)

    @property
    def _due(self) -> bool:
        fresh = self.buffer.added > self._judged + 1  # one to learn from, one to judge by
        return self.rows - self.taught >= self.plan.every and fresh and not self._broken and self._next is None

    def _features(self, scores: Scores) -> Tensor:
        return torch.cat([scores.hidden[layer] for layer in self.net.shape.layers], -1).to(
            self.inner.driver.traits.device
        )

    def _keep(self, seat: _Seat, stretch: Stretch) -> None:
        seat.stretches.append(stretch)
        seat.count += len(stretch)

    def _trim(self, seat: _Seat) -> None:
        whole = joined(seat.stretches)[-self.plan.context :]
        seat.stretches, seat.count = [whole], len(whole)

    def _swap(self) -> None:
        """Between two steps, on the thread that drafts: one assignment, no sequence sees half of a network."""
        if (made := self._next) is not None:
            self.inner.driver = made
            self._next = None

    def _update(self) -> None:
        begun = self.clock()
        try:
            self.taught, since, self._judged = self.rows, self._judged, self.buffer.added
            with _beside(self.inner.driver.traits.device):
                self._learn(self.buffer.snapshot(since))
        except Exception as error:
            self._broken = True
            log.warning("adapting the drafter failed, it stays as it is: %r", error)
        finally:
            took = self.clock() - begun
            self._rests_until = begun + took / self.plan.share
            self._thread = None

    def _learn(self, fresh: list[Stretch]) -> None:
        if len(fresh) < 2:
            return
        plan, live, embed = self.plan, self.net, self.inner.driver.embed
        order = torch.randperm(len(fresh), generator=self._noise).tolist()
        count = max(1, round(plan.held_out * len(fresh)))
        held, learnt = [fresh[i] for i in order[:count]], [fresh[i] for i in order[count:]]
        if self._before is not None:
            before, after = (judge(net, embed, fresh, plan) for net in (self._before, live))
            if is_worse(after, before):  # on text that neither has learnt from
                self._note("rolled back", before, after)
                self._offer(self._before, None)
                return
        if self._student is None:
            self._student = Student(live, plan)
        secret = {id(stretch) for stretch in held}
        older = [stretch for stretch in self.buffer.snapshot() if id(stretch) not in secret]
        candidate = self._student.learn(embed, learnt, older, self._noise)
        before, after = (judge(net, embed, held, plan) for net in (live, candidate))
        taken = not is_worse(after, before) and not torch.equal(after, before)
        self._note("taken" if taken else "refused", before, after)
        if taken:
            self._offer(candidate, live)
        else:
            self._student = None  # begin again from the one in use

    def _note(self, outcome: str, before: Tensor, after: Tensor) -> None:
        self.updates.append(Update(self.rows, outcome, float(before.mean()), float(after.mean())))
        self.outcomes[outcome] += 1
        del self.updates[:-UPDATES]

    def _offer(self, net: Eagle3Layer, before: Eagle3Layer | None) -> None:
        """For the next step; `before` is what to go back to."""
        if before is None:
            self._student = None
        self._before = before
        self._next = self.inner.driver.renewed(net)
        self.changed()


def _nothing() -> None:
    """Nobody wants to know."""


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own, so that drafting does not queue behind learning. Judging ends every update and
    waits for its numbers, so that nothing is under way when corrections are let go or the network is used."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@contextmanager
def adapt(engine: Outrider, plan: AdaptPlan | None = None, method: str = KIND) -> Iterator[Adaptation]:
    """While this lasts, requests that use `method` teach its drafter. What was learnt stays in use afterwards."""
    learning = begin(engine, plan, method)
    try:
        yield learning
    finally:
        learning.close()


def begin(engine: Outrider, plan: AdaptPlan | None = None, method: str = KIND) -> Adaptation:
    """The same until it is closed."""
    plan = plan or AdaptPlan()
    check_plan(plan)
    recipe = engine.recipe(method)
    for drafter in (recipe.drafter, *getattr(recipe.drafter, "drafters", ())):
        source = drafter.source if isinstance(drafter, Grown) else None
        if isinstance(source, Eagle3Source) and isinstance(source.driver.net, Eagle3Layer):
            drafter.source = learning = cast(Any, Adapting(source, plan))
            return Adaptation(engine, learning, recipe.options, drafter)
        if isinstance(source, CrossVocabulary):
            drafter.source = learning = cast(Any, HybridAdapting(source, plan))
            return Adaptation(engine, learning, recipe.options, drafter)
    raise InputError(
        f"method {method} has no EAGLE-3 head that could learn, nor a draft model of another vocabulary; adapt eagle3 "
        "with a drafter for it"
    )


@dataclass(slots=True)
class Adaptation:
    """What a user holds while a drafter learns."""

    engine: Outrider
    source: Adapting | HybridAdapting
    options: Any
    drafter: Grown  # whose source it stands before

    @property
    def updates(self) -> list[Update]:
        return self.source.updates

    @property
    def failed(self) -> bool:
        """Whether an update has failed, after which nothing more is learnt."""
        return self.source.failed

    def close(self) -> None:
        """Ends the thread after the update it is at; what was learnt stays in use."""
        self.source.close()
        self.drafter.source = cast(Source, self.source.inner)

    def resume(self, folder: str | Path) -> bool:
        """Go on from what `save` left in a folder, with the next step; False where nothing is there yet."""
        place = Path(folder)
        if not (place / CARD).is_file():
            return False
        if not isinstance(self.source, Adapting):
            raise InputError("a draft model goes on where it is loaded from what was saved: name the folder as draft")
        net = load_eagle3(place, self.engine.loaded)
        if net.shape != self.source.net.shape or not torch.equal(net.ids, self.source.net.ids):
            raise InputError(f"{place} holds another drafter than the one that learns; choose another folder")
        self.source.resume(net)
        return True

    def save(self, folder: str | Path) -> Path:
        """The newest network as a drafter's folder; its card says what it was adapted from."""
        place, loaded = Path(folder), self.engine.loaded
        if not isinstance(self.source, Adapting):
            self.source.save(place)
            return place
        named = getattr(self.options, "drafter", "")
        origin = find_drafter(loaded, KIND, named)
        assert origin is not None, "it was loaded from somewhere"
        if place.resolve() == origin.resolve():
            raise InputError(f"{place} holds the drafter that is being adapted; choose another folder")
        card = read_card(origin)
        taken = [asdict(update) for update in self.updates]
        learnt = {"plan": asdict(self.source.plan), "rows": self.source.rows, "updates": taken}
        recipe = {**card.recipe, "adapted": learnt}
        net = self.source.newest
        card = replace(card, layers=net.shape.layers, shape=net.shape.as_dict(), origin="", date="")
        write_drafter(place, packed(net.tensors(), False), replace(card, recipe=recipe, acceptance={}))
        return place
