"""SlotTarget over the smallest backend there is: every order of calls, and every method that needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outrider import methods
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import NO_NEEDS, Needs, Piece
from outrider.core.sampling import SamplingParams
from outrider.core.tree import TokenTree, fixed, root
from outrider.runtime.slots import SlotTarget
from tests.runtime.toy_backend import NGram, TokenCache, ToyBackend

VOCAB, CONTEXT, ROWS = 11, 40, 8
MODEL = NGram(VOCAB)


def target_of(make_cache: Any = TokenCache, **options: Any) -> SlotTarget:
    return SlotTarget(ToyBackend(MODEL, context=CONTEXT, make_cache=make_cache, **options), max_slots=4, max_rows=ROWS)


# Any order of calls

Call = tuple[str, list[int]]  # what is done, and numbers that say to whom and with what
NAMES = ("text", "text", "trees", "trees", "both", "commit", "fork", "truncate", "release")
call = st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 999), min_size=9, max_size=9))
calls = st.lists(call, max_size=20)


@dataclass
class Walk:
    """A target and, beside it, what each slot should hold; every score is compared with one from scratch."""

    target: SlotTarget
    texts: dict[int, list[int]] = field(default_factory=dict)
    trees: dict[int, TokenTree] = field(default_factory=dict)  # that ran since the last commit

    def do(self, call: Call) -> None:
        name, numbers = call
        if not self.texts or (name == "text" and self.target.free_slots):
            self.acquire(numbers)
        slot = sorted(self.texts)[numbers[0] % len(self.texts)]
        if name in ("text", "trees", "both"):
            self.run(name, numbers)
        elif name == "commit" and self.trees:
            self.commit(numbers)
        elif name == "fork" and self.target.free_slots:
            length = numbers[1] % (len(self.texts[slot]) + 1)
            self.texts[self.target.fork(slot, length)] = self.texts[slot][:length]
        elif name == "truncate":
            length = numbers[1] % (len(self.texts[slot]) + 1)
            self.target.truncate(slot, length)
            del self.texts[slot][length:]
            self.trees.pop(slot, None)
        elif name == "release":
            self.target.release(slot)
            del self.texts[slot]
            self.trees.pop(slot, None)
        self.look()

    def acquire(self, numbers: Sequence[int]) -> None:
        """For a text that often begins as another one does, or did."""
        wanted = [(numbers[7] >> min(n, 9)) % 2 for n in range(numbers[8] % CONTEXT)]
        slot = self.target.acquire(wanted, "ab"[numbers[6] % 2])
        self.texts[slot] = wanted[: self.target.length(slot)]

    def run(self, name: str, numbers: Sequence[int]) -> None:
        pieces = []
        for i, (slot, text) in enumerate(sorted(self.texts.items())):
            number = numbers[1 + 2 * i : 3 + 2 * i]
            room = CONTEXT - len(text) - 1
            if (name == "text" or (name == "both" and number[0] % 2)) and room > 0:
                pieces.append(Piece(slot, [(number[1] + n) % VOCAB for n in range(1 + number[0] % min(5, room))]))
            elif name != "text" and room >= 0:
                pieces.append(Piece(slot, tree=tree_of(number, room)))
        if not pieces:
            return
        for piece, scores in zip(pieces, self.target.run(pieces, Needs(logits=True)), strict=True):
            text = self.texts[piece.slot]
            paths = [piece.tokens[: n + 1] for n in range(len(piece.tokens))]
            if piece.tree is not None:
                tree = self.trees[piece.slot] = piece.tree
                paths = [[int(tree.tokens[0]), *tree.path_tokens(node)] for node in range(len(tree))]
            assert scores.logits is not None and len(scores.logits) == len(paths)
            for row, path in zip(scores.logits, paths, strict=True):
                assert row.tolist() == MODEL.logits([*text, *path]).tolist()
            if piece.tree is None:
                text.extend(piece.tokens)
                self.trees.pop(piece.slot, None)

    def commit(self, numbers: Sequence[int]) -> None:
        slots = sorted(self.trees)
        trees = [self.trees.pop(slot) for slot in slots]
        paths = [tree.path(number % len(tree)) for tree, number in zip(trees, numbers[1:], strict=False)]
        self.target.commit(slots, paths)
        for slot, tree, path in zip(slots, trees, paths, strict=True):
            self.texts[slot] += [int(tree.tokens[node]) for node in (0, *path)]

    def look(self) -> None:
        """Every slot holds what it should; looking changes nothing that is committed."""
        assert self.target.free_slots == self.target.slots - len(self.texts)
        for slot, text in self.texts.items():
            assert self.target.length(slot) == len(text)
        whole = [slot for slot, text in self.texts.items() if len(text) < CONTEXT and slot not in self.trees]
        for slot, scores in zip(whole, self.target.run([Piece(s, tree=root(3)) for s in whole], NO_NEEDS), strict=True):
            assert scores.logits is not None
            assert scores.logits[0].tolist() == MODEL.logits([*self.texts[slot], 3]).tolist()


def tree_of(numbers: Sequence[int], depth: int) -> TokenTree:
    rng = np.random.default_rng(numbers)
    parents, depths = [-1], [0]
    while len(parents) < 1 + numbers[0] % ROWS:
        parent = int(rng.integers(len(parents)))
        if depths[parent] >= depth:
            break
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return fixed(rng.integers(0, VOCAB, len(parents)), np.array(parents))


@settings(deadline=None, max_examples=60)
@given(calls, st.booleans())
def test_any_order_of_calls_equals_a_recomputation_from_scratch(done: list[Call], mixes: bool) -> None:
    walk = Walk(target_of(mixes=mixes))
    for call in done:
        walk.do(call)


class KeepsTheRejected(TokenCache):
    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        super().keep(slots, lengths, [range(1, len(path) + 1) for path in paths])


class SharesRows(TokenCache):
    def copy(self, source: int, target: int, length: int) -> None:
        self.rows[target] = self.rows[source]


class CutsTooMuch(TokenCache):
    def cut(self, slot: int, length: int) -> None:
        super().cut(slot, max(0, length - 1))


@pytest.mark.parametrize("broken", [KeepsTheRejected, SharesRows, CutsTooMuch])
def test_a_broken_cache_is_caught(broken: type[TokenCache]) -> None:
    @settings(
        deadline=None, database=None, derandomize=True, report_multiple_bugs=False, phases=[Phase.generate],
        max_examples=2000,  # it ends at the first failure; which example that is depends on the modules in memory
    )  # fmt: skip
    @given(calls)
    def walked(done: list[Call]) -> None:
        walk = Walk(target_of(broken))
        for call in done:
            walk.do(call)

    with pytest.raises(AssertionError):
        walked()


# Passes


@pytest.mark.parametrize("mixes", [True, False])
def test_text_and_trees_together_equal_separate_passes(mixes: bool) -> None:
    tree, found = tree_of((7, 1), 9), []
    for together in (True, False):
        target = target_of(mixes=mixes)
        first, second = target.acquire(), target.acquire()
        target.run([Piece(first, [1, 2, 3])], NO_NEEDS)
        pieces = [Piece(second, [4, 5]), Piece(first, tree=tree)]
        passes = target.backend.passes
        passes.clear()
        parts = [pieces] if together else [[piece] for piece in pieces]
        scores = [s for part in parts for s in target.run(part, NO_NEEDS)]
        assert len(passes) == (1 if together and mixes else 2)
        assert scores[0].logits is None and scores[1].logits is not None
        found.append(scores[1].logits)
        assert (target.length(first), target.length(second)) == (3, 2)
    assert torch.equal(*found)


def test_what_does_not_fit_is_refused_and_leaves_no_trace() -> None:
    target = target_of()
    slot, other = target.acquire(), target.acquire()
    for piece, what in (
        (Piece(slot), "empty"), (Piece(slot, [1] * CONTEXT), "longer than the context"),
        (Piece(slot, tree=fixed(np.zeros(ROWS + 1, dtype=np.int64), np.arange(-1, ROWS))), "draft less"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=what):
            target.run([Piece(other, [1]), piece], NO_NEEDS)
    assert target.length(slot) == target.length(other) == 0 and not target.backend.passes


# Methods

PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [9, 8, 7], [5]]
MODEL_FREE = [info.name for info in methods.table() if info.needs == "nothing"]


@pytest.fixture(scope="module")
def parts() -> methods.Parts:
    target = SlotTarget(ToyBackend(NGram(VOCAB, back=2), context=120), max_slots=2, max_rows=64)
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(dtype=torch.float32, device=target.device), tokenizer=None, name="toy", fingerprint="toy",
        device=target.device,
    )  # fmt: skip
    refuse: Any = lambda *_: pytest.fail("there is no other model")  # noqa: E731
    return methods.Parts(
        target, loaded, refuse, refuse, cost=SimpleNamespace(seconds=lambda rows: 1e-3 + 1e-5 * rows, experts=None)
    )


def texts(parts: methods.Parts, recipe: Recipe, **sampling: Any) -> tuple[list[list[int]], int]:
    engine, params = Engine(parts.target, recipe, strict=True), SamplingParams(max_new_tokens=40, **sampling)
    results = [handle.result() for handle in [engine.submit(prompt, params) for prompt in PROMPTS]]
    assert parts.target.free_slots == 2
    return [result.token_ids for result in results], sum(result.stats.accepted for result in results)


def test_there_are_methods_that_need_no_model() -> None:
    assert {"plain", "prompt-lookup", "suffix", "token-recycling", "mix"} <= set(MODEL_FREE)


@pytest.mark.parametrize("name", MODEL_FREE)
def test_methods_that_need_no_model_say_what_plain_decoding_says(parts: methods.Parts, name: str) -> None:
    choices = {option.name for option in methods.find(name).option_list}
    options = {"verifier": "invariant"} if "verifier" in choices else {}  # the rule that keeps seeded text
    plain, recipe = methods.build("plain", parts), methods.build(name, parts, options)
    assert not recipe.drafter or not recipe.drafter.needs.hidden
    for sampling in ({}, {"temperature": 0.8, "seed": 5}):
        got, accepted = texts(parts, recipe, **sampling)
        assert got == texts(parts, plain, **sampling)[0]
        assert accepted > 0 or sampling or name in ("plain", "accept-none")
