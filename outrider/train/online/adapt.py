"""On-line adaptation: a drafter that goes on learning from what verification shows it, while it is in use.

arXiv 2310.07177, for EAGLE-3 heads. Lossless at every moment: only proposals change, and a rule uses the distribution
that a token was really drawn from. Positions where a proposal fell count most; those that stood count a little, so that
they are not forgotten. An update happens in a thread (or between requests), on a copy. It takes the drafter's place
between two steps unless it is worse on verified text that it has not learnt from, and is taken back if it is worse on
what comes afterwards. Old and new are measured on the same text, so that a change of domain is not taken for a bad
update. Keys and values that a running sequence has from the old weights stay: that costs acceptance, never exactness.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.layer_driver import LayerDriver
from outrider.core.protocols import Context
from outrider.core.records import Chunk, Scores, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.grown import Grown
from outrider.models.drafts import packed, read_card, write_drafter
from outrider.models.kept import find_drafter
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.train.kinds.eagle3 import following, unrolled
from outrider.train.online.buffer import Batch, Corrections, Stretch, batched, context_rows, joined, verified_rows

log = logging.getLogger("outrider")
KIND = "eagle3"


@dataclass(frozen=True, slots=True)
class AdaptPlan:
    bytes: int = 64 << 20  # of corrections kept
    every: int = 256  # rows that come in between two updates
    steps: int = 8  # of the optimizer, an update
    batch: int = 4  # stretches a step
    length: int = 96  # rows of a stretch
    context: int = 32  # of them, rows that are only looked at
    lr: float = 1e-4
    unroll: int = 5
    decay: float = 0.8  # weight of each unrolled step against the one before
    stood: float = 0.3  # weight of a position whose proposal stood, or that had none; a fallen one has 1
    top: int = 64  # tokens of a distribution that are kept
    held_out: float = 0.25  # of the newest stretches, which only judge
    background: bool = True  # else updates happen when the last running sequence ends
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one update: "taken", "refused" before it was used, or "rolled back" after it was."""

    rows: int  # seen so far
    outcome: str
    before: float  # acceptance of the drafter in use, or of the one before it
    after: float


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
        self.updates: list[Update] = []
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

    @property
    def net(self) -> Eagle3Layer:
        """The network in use."""
        return cast(Eagle3Layer, self.inner.driver.net)

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
        if self.plan.background and self._due and self._thread is None:
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
        try:
            self.taught, since, self._judged = self.rows, self._judged, self.buffer.added
            with _beside(self.inner.driver.traits.device):
                self._learn(self.buffer.snapshot(since))
        except Exception as error:
            self._broken = True
            log.warning("adapting the drafter failed, it stays as it is: %r", error)
        finally:
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

    def _offer(self, net: Eagle3Layer, before: Eagle3Layer | None) -> None:
        """For the next step; `before` is what to go back to."""
        if before is None:
            self._student = None
        self._before = before
        self._next = self.inner.driver.renewed(net)


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


class Student:
    """A copy in float32 with its optimizer."""

    def __init__(self, live: Eagle3Layer, plan: AdaptPlan) -> None:
        self.plan = plan
        self.like = next(live.parameters()).dtype
        self.net = twin(live, torch.float32).requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(
        self, embed: Callable[[Tensor], Tensor], newest: Sequence[Stretch], older: Sequence[Stretch],
        noise: torch.Generator,
    ) -> Eagle3Layer:  # fmt: skip
        """A few steps, each half on what came last and half on anything kept; a frozen copy of what came out."""
        for _ in range(self.plan.steps):
            chosen = [_pick(newest if i % 2 == 0 else older, noise) for i in range(self.plan.batch)]
            self.optimizer.zero_grad(set_to_none=True)
            loss(self.net, embed, batched(chosen), self.plan).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
        return twin(self.net, self.like)


def twin(net: Eagle3Layer, dtype: torch.dtype) -> Eagle3Layer:
    """A frozen copy of the weights alone: the original may be in use by another thread at this moment."""
    made = type(net)(net.shape, net.ids).to(net.ids.device)
    made.load_state_dict({name: weight.detach() for name, weight in net.state_dict().items()})
    return made.to(dtype).requires_grad_(False)


def _pick(stretches: Sequence[Stretch], noise: torch.Generator) -> Stretch:
    return stretches[int(torch.randint(len(stretches), (), generator=noise))]


def steps_of(net: Eagle3Layer, embed: Callable[[Tensor], Tensor], batch: Batch, steps: int) -> Iterator[Tensor]:
    """Log chances over the draft vocabulary after each column, step by step: [B, n, vocabulary]."""
    like = next(net.parameters()).dtype
    with torch.no_grad():
        embedded = embed(following(batch.tokens)).to(like)
    for after in unrolled(net, embedded, net.fuse(batch.features.to(like)), steps):
        yield net.logits(after).float().log_softmax(-1)


def counting(batch: Batch, step: int) -> Tensor:
    """[B, n]: column u says what row u + 1 said; the last says nothing, nor one whose chain began before the text."""
    weights = following(batch.weights).clone()
    weights[:, -1] = 0.0
    weights[:, :step] = 0.0
    return weights


def loss(net: Eagle3Layer, embed: Callable[[Tensor], Tensor], batch: Batch, plan: AdaptPlan) -> Tensor:
    """Forward KL to the target's distribution over the tokens kept and all others as one, a weighted position."""
    p, places = following(batch.probs), following(batch.places)
    rest = (1 - p.sum(-1)).clamp(min=1e-6)
    total, share = torch.zeros((), device=p.device), 0.0
    for step, log_q in enumerate(steps_of(net, embed, batch, plan.unroll)):
        log_kept = log_q.gather(-1, places)
        log_rest = (1 - log_kept.exp().sum(-1)).clamp(min=1e-6).log()
        far = (p * (p.clamp(min=1e-9).log() - log_kept)).sum(-1) + rest * (rest.log() - log_rest)
        weights = counting(batch, step)
        total = total + plan.decay**step * (far * weights).sum() / weights.sum().clamp(min=1e-6)
        share += plan.decay**step
    return total / share


@torch.no_grad()
def judge(
    net: Eagle3Layer, embed: Callable[[Tensor], Tensor], stretches: Sequence[Stretch], plan: AdaptPlan
) -> Tensor:  # fmt: skip
    """The chance that a drawn token is accepted, at every position of this text and in every unrolled step."""
    found = []
    for first in range(0, len(stretches), plan.batch):
        batch = batched(stretches[first : first + plan.batch])
        p, places = following(batch.probs), following(batch.places)
        for step, log_q in enumerate(steps_of(net, embed, batch, plan.unroll)):
            drawn = torch.minimum(p, log_q.gather(-1, places).exp()).sum(-1)
            found.append(drawn[counting(batch, step) > 0])
    return torch.cat(found).double().cpu()


def is_worse(after: Tensor, before: Tensor) -> bool:
    """By more than the error of the mean, position by position: less may be chance, and would stop all progress."""
    change = after - before
    return float(change.mean()) < -float(change.std()) / max(len(change), 1) ** 0.5


@contextmanager
def adapt(engine: Outrider, plan: AdaptPlan | None = None, method: str = KIND) -> Iterator[Adaptation]:
    """While this lasts, requests that use `method` teach its drafter. What was learnt stays in use afterwards."""
    plan = plan or AdaptPlan()
    _check(plan)
    drafter: Any = engine.recipe(method).drafter
    source = drafter.source if isinstance(drafter, Grown) else None
    if not (isinstance(source, Eagle3Source) and isinstance(source.driver.net, Eagle3Layer)):
        raise InputError(f"method {method} has no EAGLE-3 head that could learn; adapt eagle3 with a drafter for it")
    drafter.source = learning = Adapting(source, plan)
    try:
        yield Adaptation(engine, learning, engine.recipe(method).options)
    finally:
        learning.close()
        drafter.source = source


def _check(plan: AdaptPlan) -> None:
    if min(plan.bytes, plan.every, plan.steps, plan.batch, plan.unroll, plan.top) < 1:
        raise InputError("bytes, every, steps, batch, unroll and top of an adaptation must be above zero")
    if not (0 < plan.context < plan.length and 0 < plan.held_out < 1 and plan.lr >= 0):
        raise InputError("an adaptation wants 0 < context < length, 0 < held_out < 1 and a learning rate of 0 or more")


@dataclass(slots=True)
class Adaptation:
    """What a user holds while a drafter learns."""

    engine: Outrider
    source: Adapting
    options: Any

    @property
    def updates(self) -> list[Update]:
        return self.source.updates

    def save(self, folder: str | Path) -> Path:
        """The network in use as a drafter's folder; its card says what it was adapted from."""
        place, loaded = Path(folder), self.engine.loaded
        named = getattr(self.options, "drafter", "")
        origin = find_drafter(loaded, KIND, named)
        assert origin is not None, "it was loaded from somewhere"
        if place.resolve() == origin.resolve():
            raise InputError(f"{place} holds the drafter that is being adapted; choose another folder")
        card = read_card(origin)
        taken = [asdict(update) for update in self.updates]
        learnt = {"plan": asdict(self.source.plan), "rows": self.source.rows, "updates": taken}
        recipe = {**card.recipe, "adapted": learnt}
        net = self.source.net
        card = replace(card, layers=net.shape.layers, shape=net.shape.as_dict(), origin="", date="")
        write_drafter(place, packed(net.tensors(), False), replace(card, recipe=recipe, acceptance={}))
        return place
