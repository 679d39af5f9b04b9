"""A draft model with another tokenizer, as a source over the target's tokens for any grower and rule.

Paper: OmniDraft (arXiv 2507.02659). The draft reads the target's text in its own spelling; its next-token distribution
q is read in target tokens: a draft token stands for the target token of the same bytes, and a run of draft tokens that
the target is known to say in one token t gives q'(t) = product of q along the run, taken off its beginning. Where only
part of the runs is followed (the likeliest beginnings), and whatever the cache holds, what is handed out is what is
drawn from: lossless under every rule. Cost: one forward of the draft model a draft token, as in its own vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.errors import EmptySupport
from outrider.core.protocols import Context, Target
from outrider.core.records import NO_NEEDS, Chunk, Needs, Piece, StepRecord
from outrider.core.schedule import run_all
from outrider.core.tree import NOTHING, QRow, TokenTree
from outrider.draft.grown import Grown
from outrider.draft.model.draft_model import EMPTY
from outrider.draft.model.flight import Flight
from outrider.draft.model.mirror import Mirror
from outrider.draft.model.ngram_cache import UNIT, NgramCache, cache_for, pack, unpack
from outrider.draft.model.vocabulary_map import Vocabulary, VocabularyMap

HELD = 4  # newest ids that stay out of the draft's cache: new text may change how they are spelled
WORTH = 0.03  # least probability of a beginning that is followed
MERGING = 0.02  # share of text in merged tokens from which on the likeliest beginning is followed without a known run


@dataclass(slots=True)
class _Part:
    """What the target can say of a run so far: its longest beginning that is a token of the target's."""

    run: bytes  # packed
    prob: float
    merged: float = 0.0  # what longer runs took of it
    passed: dict[int, float] = field(default_factory=dict)  # the same, by the draft token that follows, given this part


@dataclass(slots=True)
class _Reading:
    """What may follow one node of the target's tree, as far as the draft was asked."""

    at: int  # node of the flight that spells the text up to here
    path: tuple[int, ...]  # target tokens after the pending one
    ahead: tuple[int, ...] = ()  # target tokens that the draft has spelled already
    less: Mapping[int, float] = field(default_factory=dict)  # draft token -> probability that is ruled out
    ids: NDArray[np.int64] = field(
        default_factory=lambda: EMPTY.ids
    )  # the draft's distribution, less what is ruled out
    probs: NDArray[np.float64] = field(default_factory=lambda: EMPTY.probs)
    parts: dict[int, _Part] = field(default_factory=dict)  # draft token -> itself, where its runs were followed
    runs: dict[int, _Part] = field(default_factory=dict)  # target token -> its run
    waiting: list[tuple[bytes, int, float, _Part]] = field(default_factory=list)  # run, node, probability, its part


@dataclass(slots=True)
class _Seat:
    """One sequence's place in the draft model's cache."""

    slot: int
    context: Context
    mirror: Mirror
    cache: NgramCache
    flight: Flight = field(default_factory=Flight)
    stayed: int = 0  # leading ids of the mirror that are as when the flight began
    readings: list[_Reading] = field(default_factory=list)


@dataclass(slots=True)
class CrossVocabulary:
    target: Target  # the draft model's own runtime
    mapped: VocabularyMap
    names: dict[int, str]  # the target's special tokens
    vocabulary: Vocabulary  # the draft's
    width: int = 256  # how many of the likeliest tokens a row keeps
    memory_bytes: int = 4 << 20
    beginnings: int = 3  # likeliest draft tokens of a row whose runs are followed; 0: nothing is merged
    private: bool = False  # what is learnt serves its own request only
    name: str = "draft-model"
    needs: Needs = field(default_factory=Needs)
    cache: NgramCache = field(init=False)
    merging: float = MERGING  # of the text so far, the share of tokens that the draft spells in several
    _seats: dict[int, _Seat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = cache_for(self.mapped, self.memory_bytes)

    def begin(self, slot: int, context: Context) -> None:
        cache = NgramCache(self.cache.vocabularies, self.memory_bytes) if self.private else self.cache
        mirror = Mirror(self.mapped.target, self.names, self.vocabulary)
        seat = self._seats[slot] = _Seat(self.target.acquire(), context, mirror, cache)
        self._take_up(seat)
        seat.stayed = len(mirror.ids)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        """The same stretches of text through the draft model, in its spelling."""
        texts = []
        for chunk in chunks:
            seat = self._seats[chunk.slot]
            ids, cached = seat.mirror.ids, self.target.length(seat.slot)
            until = min(seat.mirror.within(chunk.start + len(chunk.tokens)), len(ids) - HELD)
            if self._fits(seat) and until > cached:
                texts.append((seat.slot, ids[cached:until]))
        run_all(self.target, texts)

    def end(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None:
            self._take_up(seat)
            self.target.release(seat.slot)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        """The text is read again when drafting goes on."""

    def start(self, slots: Sequence[int]) -> list[QRow]:
        seats = [self._seats[slot] for slot in slots]
        for seat in seats:
            self._take_up(seat)
            seat.readings = []
        fitting = [seat for seat in seats if self._fits(seat)]
        self._catch_up(fitting)
        for seat in fitting:
            seat.readings.append(_Reading(len(seat.flight.tokens) - 1, ()))
        self._read([(seat, reading) for seat in seats for reading in seat.readings])
        return [self._distribution(seat, seat.readings[0]) if seat.readings else EMPTY for seat in seats]

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        seats = [self._seats[slot] for slot in slots]
        for seat, tree, count in zip(seats, trees, done, strict=True):
            del seat.readings[count:]
            for node in range(count, len(tree)):
                parent = seat.readings[int(tree.parents[node])]
                seat.readings.append(self._step(seat, parent, int(tree.tokens[node])))
        new = [(seat, seat.readings[count:]) for seat, count in zip(seats, done, strict=True)]
        self._read([(seat, reading) for seat, readings in new for reading in readings])
        return [[self._distribution(seat, reading) for reading in readings] for seat, readings in new]

    # The draft's view of the text

    def _take_up(self, seat: _Seat) -> None:
        before = seat.mirror.seen
        seat.stayed = min(seat.stayed, seat.mirror.follow(seat.context.tokens))
        merged = 0
        for token, run in seat.mirror.runs():
            if token not in self.mapped.direct:
                seat.cache.learn(token, run)
                merged += 1
        if new := seat.mirror.seen - before:
            weight = min(new / 256, 0.5)
            self.merging += weight * (merged / new - self.merging)

    def _fits(self, seat: _Seat) -> bool:
        return 0 < len(seat.mirror.ids) < self.target.max_context - 1

    def _catch_up(self, seats: Sequence[_Seat]) -> None:
        """Keep what ran and still stands, all but the newest ids, and run what the draft has missed (steps without
        speculation, a prompt that it was not handed); the rest leads the next flight."""
        for seat in seats:
            self._settle(seat)
        behind = []
        for seat in seats:
            ids, cached = seat.mirror.ids, self.target.length(seat.slot)
            if len(ids) - cached > max(self.target.max_rows // 2, HELD + 1):
                behind.append((seat.slot, ids[cached : len(ids) - HELD]))
        run_all(self.target, behind)
        for seat in seats:
            seat.flight = Flight()
            for i, token in enumerate(seat.mirror.ids[self.target.length(seat.slot) :]):
                seat.flight.add(i - 1, token)
            seat.stayed = len(seat.mirror.ids)

    def _settle(self, seat: _Seat) -> None:
        """Changes the cache: the flight's beginning that is text as it is spelled now stays, all else is dropped."""
        cached, ids, flight = self.target.length(seat.slot), seat.mirror.ids, seat.flight
        settled = len(ids) - HELD - cached
        if not flight.ran or seat.stayed < cached or settled <= 0 or flight.tokens[0] != ids[cached]:
            if flight.ran or seat.stayed < cached:
                self.target.truncate(seat.slot, min(seat.stayed, cached))
            return
        path = [0]
        while len(path) < settled:
            node = flight.index.get((path[-1], ids[cached + len(path)]), NOTHING)
            if not 0 <= node < flight.ran:
                break
            path.append(node)
        self.target.commit([seat.slot], [path[1:]])

    # Reading the draft's distributions in target tokens

    def _step(self, seat: _Seat, parent: _Reading, token: int) -> _Reading:
        """Where the draft stands after one more target token: the likeliest of its spellings."""
        path = (*parent.path, token)
        if parent.ahead:
            return _Reading(parent.at if token == parent.ahead[0] else NOTHING, path, parent.ahead[1:], parent.less)
        ahead: tuple[int, ...] = ()
        single, merged = self._single(parent, token), parent.runs.get(token)
        if merged is not None and (single is None or merged.prob - merged.merged >= single.prob - single.merged):
            chosen = merged
        elif single is not None:
            spelled = self.mapped.spelled(_last(single.run))
            if not spelled:
                return _Reading(NOTHING, path)
            chosen, ahead = single, spelled[1:]
        else:
            return _Reading(NOTHING, path)
        at = parent.at
        for draft_token in unpack(chosen.run):
            at = self._add(seat, at, draft_token)
        return _Reading(at, path, ahead, chosen.passed)

    def _single(self, reading: _Reading, token: int) -> _Part | None:
        """The likeliest draft token that begins with this target token."""
        same = np.nonzero(self.mapped.first[reading.ids] == token)[0]
        if not len(same):
            return None
        best = int(same[reading.probs[same].argmax()])
        draft_token = int(reading.ids[best])
        return reading.parts.get(draft_token) or _Part(pack([draft_token]), float(reading.probs[best]))

    def _add(self, seat: _Seat, parent: int, token: int) -> int:
        """A node of the flight, where there is room for it."""
        flight = seat.flight
        if parent == NOTHING or (parent, token) in flight.index:
            return flight.index.get((parent, token), NOTHING)
        deep = self.target.length(seat.slot) + flight.depths[parent] + 2 >= self.target.max_context
        return NOTHING if deep or len(flight.tokens) >= self.target.max_rows else flight.add(parent, token)

    def _read(self, readings: Sequence[tuple[_Seat, _Reading]]) -> None:
        """Ask the draft what follows these nodes and the likeliest beginnings of runs there, level by level."""
        readings = [(seat, reading) for seat, reading in readings if reading.at != NOTHING and not reading.ahead]
        self._run([seat for seat, _ in readings])
        for seat, reading in readings:
            reading.ids, reading.probs = _conditioned(*self._draft_probs(seat, reading.at), reading.less)
            for rank, i in enumerate(np.argsort(-reading.probs, kind="stable")[: self.beginnings].tolist()):
                if (prob := float(reading.probs[i])) >= WORTH:
                    token = int(reading.ids[i])
                    reading.parts[token] = part = _Part(pack([token]), prob)
                    self._wait(seat, reading, part.run, reading.at, prob, part, rank == 0)
        while any(reading.waiting for _, reading in readings):
            self._run([seat for seat, reading in readings if reading.waiting])
            for seat, reading in readings:
                waiting, reading.waiting = reading.waiting, []
                for run, node, prob, part in waiting:
                    self._merge(seat, reading, run, node, prob, part)

    def _wait(
        self, seat: _Seat, reading: _Reading, run: bytes, parent: int, prob: float, part: _Part, best: bool
    ) -> None:
        """Follow this beginning if known runs begin with it; the best one also where a target token could."""
        follow = seat.cache.goes_on(run)
        if best and not follow and self.merging >= MERGING:
            follow = self.mapped.goes_on(self._piece(run))
        if follow and (node := self._add(seat, parent, _last(run))) != NOTHING:
            reading.waiting.append((run, node, prob, part))

    def _piece(self, run: bytes) -> bytes:
        return b"".join(self.mapped.draft[i] for i in unpack(run))

    def _merge(self, seat: _Seat, reading: _Reading, run: bytes, node: int, prob: float, part: _Part) -> None:
        """Give the runs that go on from here their probability, and take it off the part that they go on from."""
        ids, probs = self._draft_probs(seat, node)
        keys = pack(ids)
        for i, q in enumerate(probs.tolist()):
            if (reach := prob * q) < WORTH / 100:  # likeliest first: the rest is not worth a look
                break
            longer, whole = run + keys[i * UNIT : (i + 1) * UNIT], part
            token = seat.cache.token(longer)
            if token == NOTHING and reach >= WORTH:  # not said yet, but the target has a token for it
                token = self.mapped.token(self._piece(longer))
                token = NOTHING if token in self.mapped.direct else token
            if token != NOTHING and token not in reading.runs:
                whole = reading.runs[token] = _Part(longer, reach)
                following = _last(longer[: len(part.run) + UNIT])
                part.merged += reach
                part.passed[following] = part.passed.get(following, 0.0) + reach / part.prob
            if reach >= WORTH:
                self._wait(seat, reading, longer, node, reach, whole, i == 0)

    def _distribution(self, seat: _Seat, reading: _Reading) -> QRow:
        """The distribution over target tokens, warped as the target's rows are."""
        if reading.at == NOTHING:
            return EMPTY
        if reading.ahead:
            return QRow(np.array(reading.ahead[:1], dtype=np.int64), np.ones(1))
        tokens, weights = in_target_tokens(reading, self.mapped.first)
        if not len(tokens):
            return EMPTY
        logits = np.full(len(self.mapped.target), -np.inf, dtype=np.float32)
        logits[tokens] = np.log(weights)
        try:
            return seat.context.draft_rows(torch.from_numpy(logits[None]), [reading.path], self.width)[0]
        except EmptySupport:  # all that the draft can think of is banned here
            return EMPTY

    # Running the draft

    def _run(self, seats: Sequence[_Seat]) -> None:
        due = list({id(seat): seat for seat in seats if seat.flight.ran < len(seat.flight.tokens)}.values())
        if not due:
            return
        flights = [Piece(seat.slot, tree=seat.flight.tree(), done=seat.flight.ran) for seat in due]
        for seat, scores in zip(due, self.target.run(flights, NO_NEEDS), strict=True):
            assert scores.logits is not None
            for i, row in enumerate(scores.logits):
                seat.flight.logits[seat.flight.ran + i] = row
            seat.flight.ran = len(seat.flight.tokens)

    def _draft_probs(self, seat: _Seat, node: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The draft's own next tokens there, likeliest first, of those that stand for something."""
        flight = seat.flight
        if node not in flight.rows:
            probs = torch.softmax(flight.logits.pop(node).float(), -1)
            top = torch.topk(probs, min(self.width, probs.numel()))
            ids, values = top.indices.cpu().numpy(), top.values.double().cpu().numpy()
            known = (ids < len(self.mapped.first)) & (values > 0)
            for token in ids[known & (values >= WORTH)].tolist():
                self.mapped.spelled(token)  # the likely ones as the target's tokenizer has them
            known[known] = self.mapped.first[ids[known]] != NOTHING
            flight.rows[node] = ids[known], values[known]
        return flight.rows[node]


def in_target_tokens(
    reading: _Reading, first: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:  # fmt: skip
    """q' of one reading: every target token with its probability, the part of q that stands for something."""
    taken = np.array([reading.parts[i].merged if i in reading.parts else 0.0 for i in reading.ids.tolist()])
    runs = reading.runs
    tokens = np.concatenate([first[reading.ids], np.fromiter(runs, dtype=np.int64, count=len(runs))])
    weights = np.concatenate([reading.probs - taken, [part.prob - part.merged for part in runs.values()]])
    distinct, place = np.unique(tokens, return_inverse=True)
    sums = np.zeros(len(distinct))
    np.add.at(sums, place, weights)
    some = sums > 1e-12  # rounding may leave less than nothing of a beginning whose runs took all
    return distinct[some], sums[some]


def _conditioned(
    ids: NDArray[np.int64], probs: NDArray[np.float64], less: Mapping[int, float]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The next draft token, given that what is in `less` does not come: that text had another spelling."""
    if not less:
        return ids, probs
    left = probs - np.array([less.get(i, 0.0) for i in ids.tolist()])
    some = left > 1e-12
    return (ids[some], left[some] / (1.0 - sum(less.values()))) if some.any() else (ids, probs)


def _last(run: bytes) -> int:
    return int.from_bytes(run[-UNIT:], sys.byteorder)


@dataclass(slots=True)
class CrossVocabularyDrafter(Grown):
    """A grown drafter that keeps what its source has learnt of the two vocabularies."""

    @property
    def _cache(self) -> NgramCache:
        return cast(CrossVocabulary, self.source).cache

    def memory(self) -> dict[str, NDArray[Any]]:
        return self._cache.memory()

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._cache.remember(arrays)

    def forget(self) -> None:
        self._cache.forget()
