"""Drafts for the requests of another engine, from their tokens alone: the model-free mixture and its controller.

The engine hands over every text before each step; which candidates of the last step were right is read off the text
that came. Lossless as far as the engine's verification is: drafts are point masses. Cost: tens of microseconds a text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.control.cost_model import CostModel
from outrider.control.goodput import Goodput
from outrider.core.errors import InputError
from outrider.core.proposals import Candidates, Proposals
from outrider.core.protocols import Part
from outrider.core.records import Budget, Load, Role, Scores, StepRecord, StepTiming, Verdict
from outrider.core.tree import NOTHING, QRow, TokenTree
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.draft.lookup.suffix import Suffix
from outrider.draft.mix import Mix
from outrider.draft.rehearsal import rehearse

Tokens = NDArray[np.int64]
Key = TypeVar("Key", bound=Hashable)  # how the engine names a request
GUESS = 0.02  # seconds of a step of one row, before one was seen; only how it grows with rows matters
ROW = 0.03  # what a row more adds to it
REHEARSED = 8  # tokens of a made-up vocabulary


@dataclass(slots=True)
class Text:
    """One request as drafters see it: `core.protocols.Context`, without what needs a model."""

    tokens: Tokens
    prompt: Sequence[int]
    temperature: float = 0.0
    prediction: Sequence[int] = ()

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[len(self.prompt) :].tolist()

    def draft_rows(self, logits: Tensor, paths: Sequence[Sequence[int]], width: int) -> list[QRow]:
        raise InputError("no logits are here for a drafter to read; use one that drafts from tokens alone")

    def continuations(self) -> list[list[int]]:
        return []


@dataclass(slots=True)
class _Request:
    slot: int
    text: Text
    tree: TokenTree | None = None  # what was drafted for the step that runs


@dataclass(slots=True)
class TokenDrafter:
    """`chains`: of each trie the likeliest path only, for engines that verify no trees."""

    most: int  # candidates of one text
    chains: bool = True
    padded: bool = False  # the engine runs as many rows whatever is drafted, so that fewer candidates save nothing
    memory_bytes: int = 64 << 20
    clock: Callable[[], float] = time.perf_counter
    control: Goodput = field(init=False)
    mix: Mix = field(init=False)
    costs: CostModel | None = field(init=False)
    _requests: dict[Hashable, _Request] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _asked: tuple[frozenset[Hashable], float, float] = (frozenset(), 0.0, 0.0)  # last: who, when it ended, how long

    def __post_init__(self) -> None:
        drafters = (Suffix(memory_bytes=self.memory_bytes), PromptLookup())
        self.costs = None if self.padded else CostModel(lambda rows: GUESS * (1 + ROW * rows))
        names = tuple(drafter.name for drafter in drafters)
        limit = Budget(self.most, self.most)
        roles, parts = [Role.FREE] * len(drafters), [Part(drafter, Role.FREE) for drafter in drafters]
        trial = Goodput(limit, roles, self.costs, names)
        rehearse(Mix(parts, trial), REHEARSED, trial)  # compiles now what the first request would wait for
        self.control = Goodput(limit, roles, self.costs, names)
        self.mix = Mix(parts, self.control)

    def draft(self, texts: Mapping[Key, Tokens], rooms: Mapping[Key, int]) -> dict[Key, TokenTree]:
        """Changes state: what to verify behind each text, its last token pending, in at most so many candidates.

        Texts that were there before and are not now have ended, and are remembered.
        """
        begun = self.clock()
        self._learn(texts, begun)
        for key in [key for key in self._requests if key not in texts]:
            self.end(key)
        for key, tokens in texts.items():
            if key not in self._requests:
                self._begin(key, tokens)
        requests = [self._requests[key] for key in texts]
        slots = [request.slot for request in requests]
        limits = [Budget(room, room) for room in (rooms[key] for key in texts)]
        load = Load(len(slots), context=sum(len(tokens) for tokens in texts.values()))
        trees = self._trees(slots, limits, load, begun) if slots else []
        for request, tree in zip(requests, trees, strict=True):
            request.tree = tree
        now = self.clock()
        self._asked = frozenset(texts), now, now - begun
        return dict(zip(texts, trees, strict=True))

    def end(self, key: Hashable) -> None:
        """Changes state: the request is over; what it said may be drafted for others."""
        request = self._requests.pop(key)
        self.mix.end(request.slot)
        self.control.end(request.slot)
        self._free.append(request.slot)

    def _begin(self, key: Hashable, tokens: Tokens) -> None:
        slot = self._free.pop() if self._free else len(self._requests)
        text = Text(tokens, tokens[:-1].tolist())
        self._requests[key] = _Request(slot, text)
        self.control.begin(slot)
        self.mix.begin(slot, text)

    def _trees(self, slots: list[int], limits: list[Budget], load: Load, begun: float) -> list[TokenTree]:
        budgets = self.control.plan(slots, limits, load)
        proposals = self.mix.propose(slots, budgets, [None] * len(slots))  # type: ignore[list-item]  # nothing is drawn
        if self.chains:
            paths = [self._likeliest(candidates) for candidates in proposals.candidates]
            proposals = Proposals(proposals.trees, proposals.levels, paths, proposals.names, proposals.runs)
        return self.control.size(slots, proposals, budgets, load, self.clock() - begun)

    def _likeliest(self, candidates: Candidates) -> Candidates:
        """The path that goes to the likeliest child at every node."""
        weights = self.control.acceptance.weights(candidates)
        path, children = [0], np.flatnonzero(candidates.parents == 0)
        while len(children):
            path.append(int(children[np.argmax(weights[children])]))
            children = np.flatnonzero(candidates.parents == path[-1])
        kept = np.array(path)
        cut = Candidates(*(column[kept] for column in candidates))
        return cut._replace(parents=np.arange(-1, len(path) - 1, dtype=np.int64))

    def _learn(self, texts: Mapping[Any, Tokens], now: float) -> None:
        """Changes state: texts grew by what the last step said, and the step took the time that went by."""
        who, ended, drafting = self._asked
        slots, records = [], []
        for key, request in self._requests.items():
            tokens = texts.get(key)
            if tokens is None or request.tree is None or len(tokens) <= len(request.text.tokens):
                continue
            emitted = tuple(tokens[len(request.text.tokens) :].tolist())
            request.text.tokens = tokens
            slots.append(request.slot)
            records.append(StepRecord(request.tree, _verdict(request.tree, emitted), emitted, Scores(None)))
            request.tree = None
        if not slots:
            return
        whole = len(slots) == len(who) and frozenset(texts) == who  # nobody's prompt ran in the step
        timing = StepTiming(
            drafting, now - ended, 0.0, sum(len(record.tree) for record in records), len(slots),
            context=sum(len(tokens) for tokens in texts.values()),
        )  # fmt: skip
        if whole and self.costs is not None:
            self.costs.add(timing.rows, timing.batch, timing.verify, timing.context)
        self.mix.observe(slots, records)
        self.control.observe(slots, records, timing)


def _verdict(tree: TokenTree, emitted: Sequence[int]) -> Verdict:
    """The longest path of the tree that the text went along, and the token behind it."""
    path: list[int] = []
    node = 0
    for token in emitted[:-1]:
        node = next((child for child in tree.children(node) if tree.tokens[child] == token), NOTHING)
        if node == NOTHING:
            break
        path.append(node)
    return Verdict(tuple(path), emitted[len(path)])
