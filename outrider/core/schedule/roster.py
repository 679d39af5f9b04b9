"""Roster: who holds a slot. Lets sequences in, runs their prompts in pieces, puts them back, lets them leave.

Prompts run oldest first, and every caller's have the same share of a pass. A sequence is let in where its whole text
fits beside those that run; where blocks run out after all, the youngest is put back to wait, and its text is recomputed
later. Where all slots are taken, a caller who has less than his share of them gets one that another has above his.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.errors import OutriderError
from outrider.core.generation import FinishReason
from outrider.core.protocols import Target
from outrider.core.records import Chunk, Piece
from outrider.core.schedule.groups import by_recipe
from outrider.core.schedule.guard import Guard
from outrider.core.schedule.passes import Ran
from outrider.core.schedule.report import read_prompt
from outrider.core.schedule.waiting import Waiting
from outrider.core.sequence import Running

RESERVE = 16  # rows that must be free for each of those that run when another is let in
SEEN = 32  # last rows of a text that run also where they were found, for drafters that go on from what the target gives


class Stretch(NamedTuple):
    """What runs of one sequence's text in the next pass."""

    s: Running
    start: int  # tokens before it
    piece: Piece


class Roster:
    """`running` is in the order in which they were let in."""

    def __init__(self, target: Target, guard: Guard) -> None:
        self.target, self.guard = target, guard
        self.queue = Waiting()
        self.running: list[Running] = []
        self.gone: list[Running] = []  # since it was last asked
        self.preempted = 0  # since it was last asked
        self._no_room = False  # who is next did not fit, and nobody has left since

    def ready(self) -> list[Running]:
        """Those whose text is in the cache, all but the pending token."""
        return [s for s in self.running if s.slot >= 0 and not s.behind]

    # Coming

    def admit(self) -> None:
        """Waiting sequences take free slots."""
        self._follow()
        self._no_room &= bool(self.running)
        while (s := self.queue.first()) is not None and not self._no_room:
            if self._free() < 1 and not self._make_way(s):
                return
            if not self._seat(s):
                self._no_room = True
                return
            self.queue.take(s)

    def _free(self) -> int:
        return self.target.free_slots - sum(s.slot < 0 for s in self.running)

    def _seat(self, s: Running) -> bool:
        """Whether there is room for it beside those that run."""
        s.leader = self._leader(s)
        if s.leader is None and not self._take_slot(s):
            return False
        self.running.append(s)
        if not s.started:
            s.started = time.perf_counter()
            s.stats.queue_s = s.started - s.submitted
        return True

    def _leader(self, s: Running) -> Running | None:
        """Another sample of its request whose prompt runs for both, where no drafter asks for its rows."""
        if s.history.generated or (s.drafter is not None and s.drafter.needs.of_prompt):
            return None
        same = (r for r in self.running if r.request == s.request and r.slot >= 0 and r.behind)
        return next((r for r in same if not r.history.generated), None)

    def _take_slot(self, s: Running) -> bool:
        slot = self.target.acquire(s.text_to_find, s.terms.cache_salt)
        if s.drafter is not None and s.drafter.needs.of_prompt:
            unseen = max(0, len(s.history.tokens) - 1 - SEEN)
            if self.target.length(slot) > unseen:
                self.target.truncate(slot, unseen)
        behind = len(s.history.tokens) - 1 - self.target.length(slot)
        rows = {r.slot: r.behind + RESERVE for r in self.running if r.slot >= 0}
        if rows and not self.target.fits(rows | {slot: behind + RESERVE}):
            self.target.release(slot)
            return False
        if not s.started:
            s.stats.cached_tokens = self.target.length(slot)
        self._begin(s, slot)
        return True

    def _follow(self) -> None:
        """Samples whose prompt has run for another one get a slot that holds it."""
        for s in [s for s in self.running if s.slot < 0]:
            leader = s.leader
            if leader is None or leader.slot < 0:  # it left, or was put back
                s.leader = None
                if leader is not None and isinstance(leader.error, OutriderError) and not s.cancelled:
                    self.end(s, leader.error)
                elif not self._take_slot(s):
                    self.put_back(s)
            elif not leader.behind:
                s.leader = None
                self._begin(s, self.target.fork(leader.slot))

    def _begin(self, s: Running, slot: int) -> None:
        s.slot, s.behind = slot, len(s.history.tokens) - 1 - self.target.length(slot)
        s.recipe.controller.begin(slot)
        if s.drafter is not None:
            self.guard.call([s], s.drafter.begin, slot, s.history)

    # Prompts

    def stretches(self, rows: int) -> list[Stretch]:
        """So many rows of the texts that are behind: as many of each caller, his oldest first."""
        lines: dict[str, list[Running]] = {}
        for s in self.running:
            if s.slot >= 0 and s.behind:
                lines.setdefault(s.terms.caller, []).append(s)
        found = []
        for left, line in zip(range(len(lines), 0, -1), sorted(lines.values(), key=_rows_of), strict=True):
            share = max(rows // left, 1)
            for s in line:
                count = min(s.behind, share)
                if count:
                    start = len(s.history.tokens) - 1 - s.behind
                    found.append(Stretch(s, start, Piece(s.slot, s.history.tokens[start : start + count].tolist())))
                share, rows = share - count, rows - count
        return found

    def have_run(self, stretches: Sequence[Stretch], ran: Ran) -> None:
        """Changes state: each drafter sees what ran of its sequences; those whose rows failed end."""
        chunks = {}
        for s, start, piece in stretches:
            if s.slot in ran.failed:
                self.end(s, ran.failed[s.slot])
            else:
                s.behind -= len(piece.tokens)
                chunks[s.slot] = Chunk(s.slot, start, piece.tokens, ran.scores[s.slot])
                read_prompt(s, chunks[s.slot])
        for group in by_recipe([s for s, _, _ in stretches if not s.left]):
            drafter, following = group.followers()
            if drafter is not None:
                self.guard.call(following, drafter.absorb, [chunks[s.slot] for s in following])
        self._follow()

    # Going

    def make_room(self, ready: Sequence[Running], stretches: Sequence[Stretch]) -> bool:
        """Puts back the youngest until these rows fit; whether all of those who run still do."""
        rows = {s.slot: 1 for s in ready} | {one.s.slot: len(one.piece.tokens) for one in stretches}
        seated, whole = [s for s in self.running if s.slot >= 0], True
        while len(seated) > 1 and not self.target.fits(rows):
            rows.pop(seated[-1].slot, None)
            self.put_back(seated.pop())
            whole = False
        return whole

    def _make_way(self, s: Running) -> bool:
        """Whether a slot was taken from a caller with more than his share for one who has less."""
        held: dict[str, int] = {s.terms.caller: 0}
        for other in self.running:
            held[other.terms.caller] = held.get(other.terms.caller, 0) + 1
        share = len(self.running) // len(held)
        most = max(held, key=held.__getitem__)
        if held[s.terms.caller] >= share or held[most] <= share:
            return False
        given = [r for r in self.running if r.terms.caller == most and r.terms.priority >= s.terms.priority]
        if given:
            self.put_back(given[-1])
        return bool(given) and self._free() > 0

    def put_back(self, s: Running) -> None:
        """Changes state: it waits again, and its text will be recomputed, with the same result."""
        self.running.remove(s)
        self._vacate(s)
        s.stats.preemptions += 1
        self.preempted += 1
        self.queue.put_back(s)

    def end(self, s: Running, error: Exception) -> None:
        """Changes state: a fault ends this sequence and no other."""
        s.error = s.error or error
        self.leave(s, FinishReason.ERROR)

    def leave(self, s: Running, reason: FinishReason) -> None:
        """Changes state: it has ended; its slot is free."""
        s.close(reason)
        if s in self.running:
            self.running.remove(s)
        else:
            self.queue.remove(s)
        self._vacate(s)
        self._no_room = False
        s.left = True
        self.gone.append(s)
        s.deliver()
        self.queue.forget({other.terms.caller for other in self.running})

    def _vacate(self, s: Running) -> None:
        slot = s.slot
        if slot >= 0:
            self.target.release(slot)
            s.recipe.controller.end(slot)
            if s.drafter is not None:
                self.guard.call([s], s.drafter.end, slot)
        s.slot, s.behind = -1, 0


def _rows_of(line: Sequence[Running]) -> int:
    return sum(s.behind for s in line)
