"""Lookahead: the tree is the paper's two-branch mask, the pool is bounded and true to its keys, text stays plain's."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.check.enumeration import Branches, outcomes
from outrider.check.exhaustive import CONTEXT, plain_distribution
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe, Remembers
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import chain, merge
from outrider.draft.table.lookahead import Lookahead
from outrider.draft.table.ngram_pool import NgramPool
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive

PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


def run(target: ToyLM, recipe: Recipe, prompts, params: SamplingParams) -> list:
    engine = Engine(ToyTarget(target), recipe, strict=True)
    return [handle.result() for handle in [engine.submit(p, params) for p in prompts]]


def lookahead(drafter: Lookahead, nodes: int = 24, depth: int = 8, verifier=None) -> Recipe:
    return Recipe("lookahead", drafter, verifier or Invariant(), Fixed(Budget(nodes, depth)))


def begun(drafter: Lookahead, text: list[int], columns=None) -> History:
    history = History(text, SamplingParams(), 100)
    drafter.begin(0, history)
    if columns is not None:
        drafter._slots[0].columns = np.array(columns)
    return history


COLUMNS = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]  # W = 3, N = 4: one column a row


def test_the_window_is_the_papers_mask_as_a_tree() -> None:
    """Level l of column j stands at position j + l + 1, sees the first tokens of columns 0 .. j and its own column."""
    drafter = Lookahead(window=3, ngram=4)
    begun(drafter, [1], COLUMNS)
    (tree,) = drafter.propose([0], [Budget(24, 8)], [])
    mask, node = tree.ancestor_mask(), {int(token): i for i, token in enumerate(tree.tokens)}
    assert len(tree) == 10
    for j, column in enumerate(COLUMNS):
        for level, token in enumerate(column):
            at = node[token]
            assert tree.depths[at] == j + level + 1
            sees = {1, *(COLUMNS[i][0] for i in range(j + 1)), *column[: level + 1]}
            assert {int(t) for t in tree.tokens[mask[at]]} == sees


def test_ngrams_of_the_pending_token_come_first_and_share_nodes_with_the_window() -> None:
    drafter = Lookahead(window=3, ngram=4, guesses=2, text=False)
    begun(drafter, [1], COLUMNS)
    drafter._slots[0].pool.add(np.array([[1, 7, 8, 9], [2, 7, 8, 9], [1, 10, 11, 5]]))
    (tree,) = drafter.propose([0], [Budget(24, 8)], [])
    assert tree.path_tokens(3) == [10, 11, 5] and tree.path_tokens(6) == [7, 8, 9]  # the most recent one first
    assert tree.candidates == 6 + 9 - 2  # 10 and 11 stand once
    assert tree.weights is not None and (tree.weights[1:] <= tree.weights[tree.parents[1:]]).all()
    small = drafter.propose([0], [Budget(9, 4)], [])[0]
    assert small.candidates == 6 + 1  # one whole column, of which two nodes were there
    assert drafter.propose([0], [Budget(8, 4)], [])[0].candidates == 6  # a column must fit as if it shared nothing


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.integers(2, 6), st.integers(1, 5))
def test_the_budget_bounds_nodes_and_depth(nodes: int, depth: int, window: int, ngram: int, guesses: int) -> None:
    drafter = Lookahead(window, ngram, guesses)
    begun(drafter, [1, 2, 3, 1, 2, 4, 1, 5, 1, 2, 3, 1])
    (tree,) = drafter.propose([0], [Budget(nodes, depth)], [])
    assert tree.candidates <= nodes and tree.depth <= depth
    assert len({(p, t) for p, t in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}) == len(tree)


def test_columns_grow_by_the_targets_token_and_their_ngrams_enter_the_pool() -> None:
    drafter = Lookahead(window=3, ngram=4, text=False)
    history = begun(drafter, [1], COLUMNS)
    (tree,) = drafter.propose([0], [Budget(24, 8)], [])
    logits = torch.eye(100)[(tree.tokens + 50) % 100]  # after each token comes it plus fifty
    history.append([60])
    drafter.observe([0], [StepRecord(tree, Verdict((), 60), (60,), Scores(logits))])
    slot = drafter._slots[0]
    assert slot.columns.tolist() == [[11, 12, 62], [21, 22, 72], [31, 32, 82]]
    assert slot.pool.find(20, 9).tolist() == [[21, 22, 72]]
    (tree,) = drafter.propose([0], [Budget(24, 8)], [])
    logits = torch.eye(100)[(tree.tokens + 50) % 100]
    history.append([11, 99])  # the first column's first token was right
    drafter.observe([0], [StepRecord(tree, Verdict((tree.child(0, 11),), 99), (11, 99), Scores(logits))])
    assert slot.columns.tolist() == [[22, 72, 22], [32, 82, 32]]  # two tokens on: the first column was overtaken


def test_a_merged_tree_gives_the_same_ngrams_as_the_own_one() -> None:
    drafter = Lookahead(window=3, ngram=4, text=False)
    history = begun(drafter, [1], COLUMNS)
    tree = merge(chain(1, [33, 34]), drafter.propose([0], [Budget(24, 8)], [])[0])
    history.append([60])
    record = StepRecord(tree, Verdict((), 60), (60,), Scores(torch.eye(100)[(tree.tokens + 50) % 100]))
    drafter.observe([0], [record])
    assert drafter._slots[0].columns.tolist() == [[11, 12, 62], [21, 22, 72], [31, 32, 82]]


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_greedy_text_is_plains(seed: int, window: int, ngram: int, guesses: int, text: bool, shared: bool) -> None:
    target = ToyLM(6, seed=seed, order=2, concentration=0.3)
    params, prompts = SamplingParams(max_new_tokens=24), [[0, 1], [3], [2, 2, 5, 4]]
    drafter = Lookahead(window, ngram, guesses, text, shared)
    want = run(target, PLAIN, prompts, params)
    assert [g.token_ids for g in run(target, lookahead(drafter), prompts, params)] == [g.token_ids for g in want]


@pytest.mark.parametrize("verifier", [Invariant(), Recursive()], ids=lambda v: v.name)
def test_sampled_text_has_the_targets_distribution(verifier) -> None:
    target, tokens = ToyLM(3, seed=11), 4

    def generate(paths: Branches) -> tuple[int, ...]:
        engine = Engine(
            ToyTarget(target), lookahead(Lookahead(2, 3, 2), verifier=verifier), strict=True,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=0)
        return tuple(engine.submit(CONTEXT, params).result().token_ids)

    found, want = outcomes(generate, limit=200_000), plain_distribution(target, tokens)
    assert max(abs(found.get(key, 0.0) - want.get(key, 0.0)) for key in {*found, *want}) < 1e-6


class Cycle(ToyLM):
    """Counts round and round: what comes next is certain, and the text repeats itself."""

    def probs(self, context):
        return np.eye(self.vocab)[(int(context[-1]) + 1) % self.vocab]


@pytest.mark.parametrize("text", [True, False])
def test_fewer_steps_than_tokens_on_a_repetitive_target(text: bool) -> None:
    """Without the text's own n-grams they must come out of the window."""
    params = SamplingParams(max_new_tokens=60)
    (made,) = run(Cycle(7), lookahead(Lookahead(text=text)), [[3, 5, 1]], params)
    assert made.token_ids == [(2 + i) % 7 for i in range(60)]
    assert made.stats.steps < 30


def test_the_ngrams_of_another_request_help_only_where_they_are_shared() -> None:
    params, steps = SamplingParams(max_new_tokens=40), {}
    for shared in (False, True):
        engine = Engine(ToyTarget(Cycle(40)), lookahead(Lookahead(shared=shared)), strict=True)
        for _ in range(2):
            steps[shared] = engine.submit([0], params).result().stats.steps
    assert steps[True] < steps[False]


class Oracle:
    """The pool in plain Python, without sets: enough for few first tokens."""

    def __init__(self, share: int) -> None:
        self.share, self.by_first = share, {}

    def add(self, gram: tuple[int, ...]) -> None:
        grams = self.by_first.setdefault(gram[0], deque(maxlen=self.share))
        if gram in grams:
            grams.remove(gram)
        grams.append(gram)

    def find(self, first: int, count: int) -> list[list[int]]:
        return [list(gram[1:]) for gram in list(self.by_first.get(first, ()))[::-1][:count]]


grams = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), max_size=60)


@given(grams, st.integers(1, 4))
def test_the_pool_keeps_the_most_recent_ngrams_of_each_first_token(added, share: int) -> None:
    """At most four first tokens: no set is ever crowded, whatever falls together."""
    pool, oracle = NgramPool(3, share, limit=1 << 12), Oracle(share)
    for gram in added:
        pool.add(np.array([gram]))
        oracle.add(gram)
    for first in range(5):
        assert pool.find(first, 3).tolist() == oracle.find(first, 3)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(200, 2000))
def test_a_crowded_pool_stays_bounded_and_never_answers_for_another_token(text: list[int], limit: int) -> None:
    pool = NgramPool(4, 2, limit)
    before = pool.bytes
    pool.add_text(np.array(text), 0)
    assert pool.bytes == before <= limit
    there = {tuple(text[i : i + 4]) for i in range(len(text) - 3)}
    for first in {*text, 999}:
        assert {(first, *rest) for rest in pool.find(first, 9).tolist()} <= there
    if len(text) >= 4:  # the newest is always there
        assert pool.find(text[-4], 1).tolist() == [text[-3:]]


def test_a_text_that_grows_piece_by_piece_gives_the_same_pool() -> None:
    text = np.random.default_rng(0).integers(0, 9, 80)
    whole, pieces = NgramPool(3, 4), NgramPool(3, 4)
    whole.add_text(text, 0)
    for start, end in ((0, 1), (1, 2), (2, 40), (40, 41), (41, 80)):
        pieces.add_text(text[:end], start)
    assert pieces.all().tolist() == whole.all().tolist()


def test_a_pool_without_room_for_one_set_is_refused() -> None:
    with pytest.raises(InputError, match="bytes or more"):
        NgramPool(4, 4, limit=100)


def test_the_shared_pool_is_kept_and_recalled_and_forgotten() -> None:
    first, second = Lookahead(shared=True), Lookahead(shared=True)
    assert isinstance(first, Remembers)
    begun(first, [1, 2, 3, 4, 5, 1, 2, 3, 9])
    second.remember(first.memory())
    begun(second, [1])
    assert second.propose([0], [Budget(3, 3)], [])[0].tokens.tolist() == [1, 2, 3, 9]
    assert second.memory()["ngrams"].tolist() == first.memory()["ngrams"].tolist()
    second.forget()
    assert len(second.memory()["ngrams"]) == 0
    assert Lookahead().memory() == {}
    for drafter, match in ((Lookahead(shared=True, ngram=5), "ngram=4"), (Lookahead(), "scope=shared")):
        with pytest.raises(InputError, match=match):
            drafter.remember(first.memory())
    with pytest.raises(InputError, match="another method"):
        second.remember({"table": np.zeros(3)})
