"""Recorded drafting: the trees of source and grower, whatever was accepted, in any batch; recorded where CUDA is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.records import Budget, Chunk, Piece, StepRecord, Verdict
from outrider.core.tree import TokenTree, root
from outrider.draft.feature.eagle3 import Eagle3Source
from outrider.draft.feature.recorded import Recorded
from outrider.draft.feature.text import ROWS_AT_ONCE, Seat
from outrider.draft.grown import Grown
from outrider.grow.topk import TopK
from outrider.models import load_model
from outrider.models.networks.eagle2 import Eagle2Layer
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.networks.fspad import FspadLayer, FspadShape
from outrider.models.trained import target_head
from outrider.runtime.cuda import reference
from outrider.runtime.layers import recorded as module
from outrider.runtime.layers.choice import fused, recording
from outrider.runtime.layers.plain import PlainDriver
from outrider.runtime.layers.recorded import TEXT_ROWS, Recording
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import eager_target

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1], list(range(40))]
Choose = Callable[[TokenTree, random.Random], list[int]]


@pytest.fixture(scope="module")
def loaded() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return load_model(LlamaForCausalLM(config).to(DEVICE).requires_grad_(False))


def network(kind: str, loaded: Any) -> Any:
    """Random weights, sharp enough that trees are deep as well as wide."""
    torch.manual_seed(2)
    ids, sizes = torch.arange(0, 52, 2), (32, 4, 2, 8, 48)
    if kind.startswith("eagle3"):
        added = {"normed": True, "scaling": (8.0, 1.0, 4.0, 64.0)} if kind == "eagle3, published" else {}
        layer: Any = Eagle3Layer(Eagle3Shape(*sizes, (0, 1, 2), 26, **added), ids)
    elif kind == "eagle2":
        layer = Eagle2Layer(Eagle3Shape(*sizes, (3,), 26), ids, target_head(loaded, ids))
    else:
        layer = FspadLayer(FspadShape(*sizes, (3,), 26, lift=20, adapter=8), ids, target_head(loaded, ids))
    for weight in layer.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3 if kind.startswith("eagle3") else 0.15)
    return layer.to(DEVICE).requires_grad_(False)


@pytest.fixture(scope="module")
def net(loaded: Any) -> Any:
    return network("eagle3", loaded)


def pair(net: Any, loaded: Any, beam: int = 4, branch: int = 4, depth: int = 5) -> tuple[Recorded, Grown]:
    """The same network twice: recorded, and through the source and the grower."""
    embed = loaded.model.get_input_embeddings()
    grower = TopK(beam=beam, branch=branch, depth=depth)
    one, two = Eagle3Source(PlainDriver(net, embed)), Eagle3Source(PlainDriver(net, embed))
    make = partial(recording, beam=beam, branch=branch)
    return Recorded(one, grower, make=make, depth=depth), Grown(two, grower)


@dataclass
class Text:
    tokens: np.ndarray
    temperature: float = 0.0


@dataclass
class Loop:
    """A target that is made to accept what a test wants; every drafter is told, the first is followed."""

    loaded: Any
    drafters: tuple[Any, ...]
    choose: Choose
    seed: int = 0
    chunk: int = 16
    target: SlotTarget = field(init=False)
    texts: dict[int, Text] = field(default_factory=dict)
    compared: int = 0

    def __post_init__(self) -> None:
        self.target = eager_target(self.loaded.model, max_slots=4, prompt_rows=self.chunk)
        self.rng = random.Random(self.seed)

    def open(self, prompt: list[int], temperature: float = 0.0, unseen: int = 0) -> int:
        """A new sequence; the drafters are handed what ran of it from position `unseen` on."""
        slot = self.target.acquire()
        text = self.texts[slot] = Text(np.array(prompt), temperature)
        for drafter in self.drafters:
            drafter.begin(slot, text)
        for start in range(0, len(prompt) - 1, self.chunk):
            tokens = prompt[start:-1][: self.chunk]
            (scores,) = self.target.run([Piece(slot, tokens)], self.drafters[0].needs)
            for drafter in self.drafters:
                if start >= unseen:
                    drafter.absorb([Chunk(slot, start, tokens, scores)])
        return slot

    def close(self, slot: int) -> None:
        for drafter in self.drafters:
            drafter.end(slot)
        self.target.release(slot)
        del self.texts[slot]

    def step(self, budgets: list[Budget], ask: bool = True) -> None:
        slots = list(self.texts)
        if ask:
            trees, *others = [d.propose(slots, budgets, [None] * len(slots)) for d in self.drafters]
            assert not getattr(self.drafters[0], "_broken", False)
            for other in others:
                for a, b in zip(trees, other, strict=True):
                    same(a, b)
                    self.compared += a.candidates > 0
        else:
            trees = [root(int(self.texts[slot].tokens[-1])) for slot in slots]
        scores = self.target.run(
            [Piece(slot, tree=tree) for slot, tree in zip(slots, trees, strict=True)], self.drafters[0].needs
        )
        for slot, tree, answer in zip(slots, trees, scores, strict=True):
            path = self.choose(tree, self.rng)
            after = self.rng.randrange(53)
            emitted = (*(int(tree.tokens[node]) for node in path), after)
            self.target.commit([slot], [path])
            self.texts[slot].tokens = np.concatenate([self.texts[slot].tokens, emitted])
            record = StepRecord(tree, Verdict(tuple(path), after), emitted, answer)
            for drafter in self.drafters:
                drafter.observe([slot], [record])


def same(a: TokenTree, b: TokenTree) -> None:
    assert a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist()
    if a.candidates == 0:
        return
    assert a.origins == b.origins and a.weights is not None and b.weights is not None
    np.testing.assert_allclose(a.weights, b.weights, rtol=1e-4)


def everything(tree: TokenTree, rng: random.Random) -> list[int]:
    return tree.path(int(tree.depths.argmax()))


def nothing(tree: TokenTree, rng: random.Random) -> list[int]:
    return []


def anything(tree: TokenTree, rng: random.Random) -> list[int]:
    return tree.path(rng.randrange(len(tree)))


@pytest.mark.parametrize("choose", [everything, nothing, anything])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3, published", "eagle2", "fspad"])
def test_the_trees_of_source_and_grower(loaded: Any, kind: str, choose: Choose) -> None:
    drafters = pair(network(kind, loaded), loaded)
    loop = Loop(loaded, drafters, choose)
    slots = [loop.open(PROMPTS[i]) for i in (0, 2, 3)]
    for step in range(8):
        loop.step([Budget(12, 5), Budget(7, 3), Budget(16, 1 + step % 5)])
    loop.close(slots[1])
    loop.open(PROMPTS[4])  # a slot that was used before, and a prompt of several chunks
    for _ in range(6):
        loop.step([Budget(12, 5)] * 3)
    assert loop.compared > 35 and not drafters[0]._broken


@pytest.mark.parametrize("kind", ["eagle3", "eagle3, published", "eagle2", "fspad"])
def test_fused_launches_change_nothing(loaded: Any, kind: str) -> None:
    recorded, grown = pair(network(kind, loaded), loaded)

    def make(driver: PlainDriver) -> Recording:
        return Recording(driver, reference, beam=4, branch=4, record=None, active=fused(driver, reference))

    recorded.make = make
    loop = Loop(loaded, (recorded, grown), anything)
    loop.open(PROMPTS[0])
    for _ in range(4):
        loop.step([Budget(12, 5)])
    assert loop.compared == 4


def test_more_rows_than_a_recording_holds_and_steps_without_a_question(loaded: Any, net: Any) -> None:
    drafters = pair(net, loaded, depth=9, beam=2)
    loop = Loop(loaded, drafters, everything)
    seat, most = drafters[0].source.seat(loop.open(PROMPTS[0])), 0
    for quiet in (0, 1, 3, 0, TEXT_ROWS - 4, TEXT_ROWS + 2, ROWS_AT_ONCE + 5, 0, 0):
        for _ in range(quiet):
            loop.step([Budget(0, 0)], ask=False)
        most = max(most, seat.rows)
        loop.step([Budget(20, 9)])
    assert loop.compared == 9 and TEXT_ROWS < most <= ROWS_AT_ONCE + 1  # nothing waits for ever


@pytest.mark.parametrize("unseen", [16, 32, 64])
def test_behind_a_prefix_it_never_saw_it_drafts_as_the_source_does(loaded: Any, net: Any, unseen: int) -> None:
    """64: nothing of the prompt was handed over."""
    loop = Loop(loaded, pair(net, loaded), anything)
    seat = loop.drafters[0].source.seat(loop.open(PROMPTS[4], unseen=unseen))
    assert seat.missed == min(unseen, len(PROMPTS[4]) - 1)
    loop.open(PROMPTS[0])
    for _ in range(6):
        loop.step([Budget(12, 5)] * 2)
    assert loop.compared >= 11 and not loop.drafters[0]._broken


def test_steps_that_it_was_not_told_of_are_left_out(loaded: Any, net: Any) -> None:
    loop = Loop(loaded, pair(net, loaded), anything)
    slot = loop.open(PROMPTS[0])
    seat = loop.drafters[0].source.seat(slot)
    for step in range(9):
        told, loop.drafters = loop.drafters, () if step in (3, 4) else loop.drafters
        if told and not loop.drafters:
            scores = loop.target.run([Piece(slot, tree=root(int(loop.texts[slot].tokens[-1])))], told[0].needs)
            assert len(scores) == 1
            loop.target.commit([slot], [[]])
            loop.texts[slot].tokens = np.concatenate([loop.texts[slot].tokens, [7 + step]])
        else:
            loop.step([Budget(9, 4)])
        loop.drafters = told
    assert seat.missed == 2 and not loop.drafters[0]._broken
    assert seat.length + seat.missed + seat.rows == len(loop.texts[slot].tokens) - 1


def test_asked_twice_it_says_the_same(loaded: Any, net: Any) -> None:
    drafters = pair(net, loaded)
    loop = Loop(loaded, drafters, anything)
    slots = [loop.open(PROMPTS[0]), loop.open(PROMPTS[3])]
    for _ in range(4):
        first = drafters[0].propose(slots, [Budget(9, 4)] * 2, [None] * 2)
        alone = drafters[0].propose(slots[1:], [Budget(9, 4)], [None])
        same(first[1], alone[0])
        loop.step([Budget(9, 4)] * 2)


def test_the_source_goes_on_where_the_recording_stopped_and_back(loaded: Any, net: Any) -> None:
    recorded, grown = pair(net, loaded)
    loop = Loop(loaded, (recorded, grown), anything)
    loop.open(PROMPTS[0])
    for step in range(12):
        recorded.sampled = bool(step % 3)  # at a temperature what samples does not record
        loop.texts[0].temperature = 1.0
        loop.step([Budget(9, 4)])
    assert loop.compared == 12


@pytest.mark.parametrize("temperature", [0.4, 1.3])
def test_distributions_follow_the_temperature(loaded: Any, net: Any, temperature: float) -> None:
    loop = Loop(loaded, pair(net, loaded), anything)
    loop.open(PROMPTS[0], temperature)
    loop.open(PROMPTS[1])
    for _ in range(6):
        loop.step([Budget(12, 4)] * 2)
    assert loop.compared == 12


def test_the_tree_of_a_small_budget_is_the_best_of_a_large_one(loaded: Any, net: Any) -> None:
    recorded = pair(net, loaded, beam=6, branch=6)[0]
    loop = Loop(loaded, (recorded,), anything)
    slot = loop.open(PROMPTS[0])
    whole = recorded.propose([slot], [Budget(60, 5)], [None])[0]
    for nodes in (1, 3, 10, 30):
        part = recorded.propose([slot], [Budget(nodes, 5)], [None])[0]
        best = np.sort(whole.weights[1:])[::-1][:nodes]
        np.testing.assert_allclose(np.sort(part.weights[1:])[::-1], best)


def hides_ancestors(masks: Any) -> torch.Tensor:
    return WORDS([1 << int(mask).bit_length() - 1 for mask in masks])


WORDS = module.words


@pytest.mark.parametrize("bug", ["mask", "place", "rows", "ran", "position"])
def test_planted_errors_are_seen(loaded: Any, net: Any, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Seat.wanted
    if bug == "mask":  # text rows see themselves only
        monkeypatch.setattr(module, "words", hides_ancestors)
    elif bug == "place":  # keys of a level one row further
        if GPU:
            pytest.skip("the kernels run, not their reference")
        store = reference.store_rows
        monkeypatch.setattr(reference, "store_rows", lambda k, v, a, b, s, p, r: store(k, v, a, b, s, p + (p > 20), r))
    elif bug == "rows":  # features of the wrong nodes
        fill = module.Inputs.fill

        def others(part: Any) -> Any:
            return replace(part, waiting=[replace(f, rows=sorted(f.rows, reverse=True)) for f in part.waiting])

        monkeypatch.setattr(module.Inputs, "fill", lambda self, wanted: fill(self, [others(part) for part in wanted]))
    elif bug == "position":  # what was missed of the text is not counted
        monkeypatch.setattr(Seat, "wanted", lambda seat, slot, depth: replace(wanted(seat, slot, depth), missed=0))
    else:  # rows in the cache are counted twice
        settle = Seat.settle
        monkeypatch.setattr(Seat, "settle", lambda seat: (setattr(seat, "length", seat.length + 1), settle(seat)))
    loop = Loop(loaded, pair(net, loaded), everything)
    loop.open(PROMPTS[4], unseen=16 if bug == "position" else 0)
    with pytest.raises((AssertionError, ValueError)):
        for _ in range(10):
            loop.step([Budget(12, 5)])
