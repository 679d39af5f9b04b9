"""Hybrid distillation: a draft model of another vocabulary learns from what verification shows it, between requests.

OmniDraft (arXiv 2507.02659). Where a target token begins where one of the draft's does, the draft's distribution over
the tokens that both have is pulled to the target's (reverse KL); where the target said a token that the draft spells in
several, the likelihood of that run is raised. Lossless at every moment: only proposals change. An update happens when
the last running sequence has ended, on a copy; it takes the draft's place unless it is worse on text that it has not
learnt from, and is taken back if it is worse on what comes afterwards.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InputError
from outrider.core.protocols import Context, Refreshes
from outrider.core.records import Chunk, Needs, StepRecord
from outrider.core.tree import QRow, TokenTree
from outrider.draft.model.cross_vocabulary import CrossVocabulary
from outrider.draft.model.mirror import Mirror
from outrider.draft.model.ngram_cache import NgramCache
from outrider.train.online.student import AdaptPlan, is_worse
from outrider.train.online.update import UPDATES, Update

log = logging.getLogger("outrider")
SHARED = 0.05  # least mass of the tokens that both vocabularies have, for their distribution to mean something


@dataclass(frozen=True, slots=True)
class Told:
    """A text in target tokens, and what the target thought of its last ones."""

    tokens: tuple[int, ...]
    places: Tensor  # [n, top]: likeliest tokens where each of the last n tokens stands
    probs: Tensor  # [n, top]

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens) + self.places.nbytes + self.probs.nbytes


@dataclass(frozen=True, slots=True)
class Lesson:
    """The same text as the draft spells it."""

    ids: Tensor  # [L]
    rows: Tensor  # [m]: after which ids a target token begins
    shared: Tensor  # [m, top]: draft ids of tokens that both have
    probs: Tensor  # [m, top]: the target's; 0 where a place holds no such token
    runs: Tensor  # [r]: rows that say an id of a run, of which the target said the whole in one token


@dataclass(slots=True)
class _Seat:
    context: Context
    places: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class HybridAdapting:
    """A source in front of a draft model of another vocabulary: hands everything on, keeps what was verified."""

    def __init__(self, inner: CrossVocabulary, plan: AdaptPlan) -> None:
        if not isinstance(inner.target, Refreshes) or getattr(inner.target, "backend", None) is None:
            raise InputError("the draft model runs where its weights cannot be changed; load it again")
        self.inner, self.plan = inner, plan
        self.name, self.needs = inner.name, Needs()
        self.model: nn.Module = inner.target.backend.model  # type: ignore[attr-defined]
        self.updates: list[Update] = []
        self.outcomes: Counter[str] = Counter()
        self.changed: Callable[[], None] = lambda: None
        self.rows = 0  # verified ones seen
        self.failed = False
        self._kept: deque[Told] = deque()
        self._fresh: list[Told] = []  # since the last update
        self._seats: dict[int, _Seat] = {}
        self._taught = 0
        self._before: dict[str, Tensor] | None = None  # weights that those in use replaced
        self._student: nn.Module | None = None
        self._optimizer: Any = None
        self._noise = torch.Generator().manual_seed(plan.seed)
        self._draft_ids = {piece: i for i, piece in enumerate(inner.mapped.draft) if piece}

    @property
    def nbytes(self) -> int:
        """Of what is kept to learn from."""
        return sum(one.nbytes for one in self._kept)

    @property
    def cache(self) -> NgramCache:
        return self.inner.cache

    def begin(self, slot: int, context: Context) -> None:
        self._seats[slot] = _Seat(context)
        self.inner.begin(slot, context)

    def absorb(self, chunks: Sequence[Chunk]) -> None:
        self.inner.absorb(chunks)

    def start(self, slots: Sequence[int]) -> list[QRow]:
        return self.inner.start(slots)

    def extend(self, slots: Sequence[int], trees: Sequence[TokenTree], done: Sequence[int]) -> list[list[QRow]]:
        return self.inner.extend(slots, trees, done)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.inner.observe(slots, records)
        for slot, record in zip(slots, records, strict=True):
            rows = [0, *record.verdict.path][: len(record.emitted)]
            if rows and record.scores.logits is not None and not self.failed:
                every = record.scores.logits[rows].float().softmax(-1)
                probs, places = every.topk(min(self.plan.top, every.shape[-1]), dim=-1)
                self._seats[slot].places.append(places.cpu())
                self._seats[slot].probs.append(probs.cpu())
                self.rows += len(rows)

    def end(self, slot: int) -> None:
        """Changes state: the text is kept; when the last one has ended, the draft learns."""
        seat = self._seats.pop(slot, None)
        self.inner.end(slot)
        if seat is not None and seat.places:
            tokens = tuple(seat.context.tokens[-self.plan.length :].tolist())
            told = Told(tokens, torch.cat(seat.places)[-len(tokens) :], torch.cat(seat.probs)[-len(tokens) :])
            self._kept.append(told)
            self._fresh.append(told)
            while self.nbytes > self.plan.bytes:
                self._kept.popleft()
        if not self._seats and self.rows - self._taught >= self.plan.every and len(self._fresh) > 1 and not self.failed:
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    self._learn()
            except Exception as error:
                self.failed = True
                log.warning("adapting the draft model failed, it stays as it is: %r", error)

    def close(self) -> None:
        """There is no thread to end."""

    def save(self, folder: Path) -> None:
        """The draft model as `transformers` reads it; its tokenizer is as it was."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    # Learning

    def _learn(self) -> None:
        """Changes state: a few steps on a copy, which is used unless it is worse on texts that were held back."""
        fresh, self._fresh, self._taught = self._fresh, [], self.rows
        pairs = [(told, lesson) for told in fresh if (lesson := self.lesson(told)) is not None]
        if len(pairs) < 2:
            return
        lessons = [lesson for _, lesson in pairs]
        if self._before is not None:
            before = self._judged(self._before, lessons)
            after = self._judged(None, lessons)
            if is_worse(after, before):
                self._note("rolled back", before, after)
                self._use(self._before, None)
                return
        order = torch.randperm(len(pairs), generator=self._noise).tolist()
        count = max(1, round(self.plan.held_out * len(pairs)))
        held, learnt = [lessons[i] for i in order[:count]], [lessons[i] for i in order[count:]]
        secret = {id(pairs[i][0]) for i in order[:count]}
        older = [one for told in self._kept if id(told) not in secret and (one := self.lesson(told)) is not None]
        candidate = self._taught_weights(learnt, older or learnt)
        before, after = self._judged(None, held), self._judged(candidate, held)
        taken = not is_worse(after, before) and not torch.equal(after, before)
        self._note("taken" if taken else "refused", before, after)
        if taken:
            self._use(candidate, {name: weight.detach().clone() for name, weight in self.model.named_parameters()})
        else:
            self._student = None

    def _taught_weights(self, newest: Sequence[Lesson], older: Sequence[Lesson]) -> dict[str, Tensor]:
        if self._student is None:
            self._student = copy.deepcopy(self.model).float().requires_grad_(True)
            rates = {"lr": self.plan.lr, "betas": (0.9, 0.95), "weight_decay": 0.0}
            self._optimizer = torch.optim.AdamW(self._student.parameters(), **rates)  # type: ignore[arg-type]
        for step in range(self.plan.steps):
            self._optimizer.zero_grad(set_to_none=True)
            for _ in range(self.plan.batch):
                among = newest if step % 2 == 0 else older
                lesson = among[int(torch.randint(len(among), (), generator=self._noise))]
                (hybrid_loss(self._student, lesson, self.plan.runs) / self.plan.batch).backward()
            nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
            self._optimizer.step()
        return {name: weight.detach().clone() for name, weight in self._student.named_parameters()}

    @torch.no_grad()
    def _judged(self, weights: dict[str, Tensor] | None, lessons: Sequence[Lesson]) -> Tensor:
        """The chance that a drawn token is accepted, where one of both vocabularies may come; None: as in use."""
        net: Any = self.model
        if weights is not None:
            net = copy.deepcopy(self.model)
            _fill(net, weights)
        return torch.cat([acceptances(net, lesson) for lesson in lessons]).double().cpu()

    def _note(self, outcome: str, before: Tensor, after: Tensor) -> None:
        self.updates.append(Update(self.rows, outcome, float(before.mean()), float(after.mean())))
        self.outcomes[outcome] += 1
        del self.updates[:-UPDATES]

    def _use(self, weights: dict[str, Tensor], before: dict[str, Tensor] | None) -> None:
        """Changes the draft model, of which no text is in use now."""
        if before is None:
            self._student = None
        _fill(self.model, weights)
        self.inner.target.refresh(self.model)  # type: ignore[attr-defined]
        self._before = before
        self.changed()

    def lesson(self, told: Told) -> Lesson | None:
        """None where nothing can be learnt from a text."""
        mapped, top = self.inner.mapped, told.places.shape[1]
        mirror = Mirror(mapped.target, self.inner.names, self.inner.vocabulary)
        mirror.follow(told.tokens)
        ids, ends = mirror.ids, mirror.ends
        first, offset = len(told.tokens) - len(told.places), 0
        rows, shared, probs, runs = list[int](), list[list[int]](), list[list[float]](), list[int]()
        for at, token in enumerate(told.tokens):
            piece = mapped.target[token] if token < len(mapped.target) else b""
            begin, offset = offset, offset + len(piece)
            row = bisect_right(ends, begin) - 1
            if at < first or not piece or row < 0 or ends[row] != begin:
                continue
            last = bisect_right(ends, offset) - 1
            if last >= row + 2 and ends[last] == offset:
                runs += range(row, last)
            pairs = zip(told.places[at - first].tolist(), told.probs[at - first].tolist(), strict=True)
            both = [(self._draft_ids[mapped.target[t]], p) for t, p in pairs if self._is_shared(t)]
            if sum(p for _, p in both) >= SHARED:
                rows.append(row)
                shared.append([i for i, _ in both] + [0] * (top - len(both)))
                probs.append([p for _, p in both] + [0.0] * (top - len(both)))
        if not rows:
            return None
        device = next(self.model.parameters()).device
        return Lesson(
            torch.tensor(ids, device=device), torch.tensor(rows, device=device), torch.tensor(shared, device=device),
            torch.tensor(probs, device=device), torch.tensor(runs, dtype=torch.long, device=device),
        )  # fmt: skip

    def _is_shared(self, token: int) -> bool:
        return token in self.inner.mapped.direct and self.inner.mapped.target[token] in self._draft_ids


def _fill(net: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(weights[name])


def hybrid_loss(net: Any, lesson: Lesson, share: float) -> Tensor:
    """Reverse KL over shared tokens, a row; and `share` times the negative log-likelihood of an id of a run."""
    log_q = net(lesson.ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    there = lesson.probs > 0
    kept = log_q[lesson.rows].gather(-1, lesson.shared).masked_fill(~there, -torch.inf)
    log_q_shared = kept.log_softmax(-1).masked_fill(~there, 0.0)
    p = lesson.probs / lesson.probs.sum(-1, keepdim=True)
    log_p = p.clamp(min=1e-9).log()
    far = (log_q_shared.exp() * (log_q_shared - log_p)).masked_fill(~there, 0.0).sum(-1).mean()
    if not len(lesson.runs):
        return far
    return far - share * log_q[lesson.runs].gather(-1, lesson.ids[lesson.runs + 1][:, None]).mean()


def acceptances(net: Any, lesson: Lesson) -> Tensor:
    """[m]: of a token that both vocabularies have, drawn there."""
    q = net(lesson.ids[None], use_cache=False).logits[0].float().softmax(-1)
    return torch.minimum(q[lesson.rows].gather(-1, lesson.shared), lesson.probs).sum(-1)
