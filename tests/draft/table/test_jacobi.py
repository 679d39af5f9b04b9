"""Jacobi: greedy text is plain's, sampled text is distributed as the target's over several steps, the window learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.check.enumeration import Branches, outcomes
from outrider.check.exhaustive import CONTEXT, plain_distribution
from outrider.check.toy import ToyLM, ToyTarget, as_row
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.proposals import Proposals
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import Draw, chain, merge, root
from outrider.draft.table.jacobi import Jacobi, continuation
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection

TARGET = ToyLM(3, seed=11)
TOKENS = 3


def engine(target: ToyLM, drafter, verifier, window: int, **more) -> Engine:
    recipe = Recipe("jacobi", drafter, verifier, Fixed(Budget(window, window)))
    return Engine(ToyTarget(target), recipe, strict=True, **more)


def distribution(make, verifier, *, window: int = 2, tokens: int = TOKENS, target: ToyLM = TARGET, **sampling):
    """Every outcome of drafting and verification of whole runs: a step's window depends on the step before."""

    def generate(paths: Branches) -> tuple[int, ...]:
        made = engine(
            target, make(), verifier, window,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=0, **sampling)
        return tuple(made.submit(CONTEXT, params).result().token_ids)

    return outcomes(generate, limit=200_000)


def distance(found, target: ToyLM = TARGET, tokens: int = TOKENS) -> float:
    want = plain_distribution(target, tokens)
    assert sum(found.values()) == pytest.approx(1.0)
    return max(abs(found.get(key, 0.0) - want.get(key, 0.0)) for key in {*found, *want})


@pytest.mark.parametrize("verifier", [Rejection(), Recursive()], ids=lambda v: v.name)
@pytest.mark.parametrize("init", ["copy", "repeat", "random"])
def test_sampled_text_has_the_targets_distribution(init: str, verifier) -> None:
    assert distance(distribution(lambda: Jacobi(2, init, sampled=True), verifier)) < 1e-6


def test_four_tokens_with_distributions_refreshed_twice_have_the_targets_distribution() -> None:
    found = distribution(lambda: Jacobi(2, "repeat", sampled=True), Rejection(), tokens=4)
    assert distance(found, tokens=4) < 1e-6


def test_truncated_distributions_on_both_sides_have_the_truncated_targets_distribution() -> None:
    found = distribution(lambda: Jacobi(2, "random", sampled=True, width=2), Rejection(), top_k=2)
    assert distance(found, replace(TARGET, top_k=2)) < 1e-6


def test_point_masses_under_the_invariant_rule_have_the_targets_distribution() -> None:
    assert distance(distribution(lambda: Jacobi(2, "copy"), Invariant())) < 1e-6


class Relabelled(Jacobi):
    """Records another row than the one drawn from."""

    def propose(self, slots, budgets, noise):
        trees = super().propose(slots, budgets, noise)
        made = [replace(tree, draws=self.relabel(self._slots[s], tree)) for s, tree in zip(slots, trees, strict=True)]
        return Proposals(made)


def test_fresh_tokens_recorded_with_the_targets_distribution_are_seen() -> None:
    """Everything fresh would be accepted."""

    class Wrong(Relabelled):
        def relabel(self, window, tree):
            known = len(window.guesses)
            text = window.context.tokens.tolist()
            rows = [as_row(TARGET.probs(text + tree.path_tokens(node))) for node in range(len(tree))]
            return tuple(
                tuple(Draw(d.token, d.child, d.row if node < known else rows[node]) for d in draws)
                for node, draws in enumerate(tree.draws)
            )

    assert distance(distribution(lambda: Wrong(2, "random", sampled=True), Rejection())) > 0.01


def test_drawing_from_a_truncated_distribution_and_recording_the_whole_one_is_seen() -> None:
    class Wrong(Jacobi):
        def _take(self, guess, tokens, rows, noise):
            super()._take(guess, tokens, rows, noise)
            if guess is self.cut:
                rows[-1] = self.whole

        def _refresh(self, context, record, rows, path):
            guesses = super()._refresh(context, record, rows, path)
            if guesses:
                wide = Jacobi(self.window, sampled=True, width=3)._refresh(context, record, rows, path)
                type(self).cut, type(self).whole = guesses[0], wide[0]
            return guesses

    Wrong.cut = Wrong.whole = None
    assert distance(distribution(lambda: Wrong(2, "repeat", sampled=True, width=2), Rejection())) > 0.01


def test_distributions_of_the_new_text_with_tokens_of_the_old_draw_are_seen() -> None:
    """A guess kept as a token is no draw of this step: calling it one is wrong."""

    class Wrong(Jacobi):
        def _take(self, guess, tokens, rows, noise):
            super()._take(guess, tokens, rows, noise)
            if rows[-1] is not None:
                tokens[-1] = int(guess.ids[0])

    assert distance(distribution(lambda: Wrong(2, "repeat", sampled=True), Rejection())) > 0.01


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(["copy", "repeat", "random"]))
def test_greedy_text_is_plains(seed: int, window: int, init: str) -> None:
    target = ToyLM(6, seed=seed, order=2, concentration=0.3)
    params = SamplingParams(max_new_tokens=20, seed=0)
    plain = Engine(ToyTarget(target), Recipe("plain", None, Invariant(), Fixed(Budget(0, 0))))
    guessing = engine(target, Jacobi(window, init), Rejection(), window)
    want, made = plain.submit([0, 1], params).result(), guessing.submit([0, 1], params).result()
    assert made.token_ids == want.token_ids
    assert made.stats.steps <= want.stats.steps  # a window of W is settled in at most W steps


def test_a_batch_gives_what_each_prompt_gives_alone() -> None:
    params = SamplingParams(max_new_tokens=16, temperature=0.8, seed=3)
    prompts = [[0, 1], [2], [1, 1, 2]]
    together = engine(TARGET, Jacobi(4, "random", sampled=True), Rejection(), 4)
    handles = [together.submit(p, params) for p in prompts]
    alone = [engine(TARGET, Jacobi(4, "random", sampled=True), Rejection(), 4).submit(p, params) for p in prompts]
    assert [h.result().token_ids for h in handles] == [h.result().token_ids for h in alone]


class Rows(ToyLM):
    """Lines of eight tokens, each most often a copy of the line above."""

    def probs(self, context):
        probs = np.full(self.vocab, 0.1 / (self.vocab - 1))
        probs[context[-8:][0]] = 0.9
        return probs


def accepted(drafter: Jacobi, target: ToyLM) -> float:
    params = SamplingParams(max_new_tokens=120, temperature=1.0, seed=1, n=4)
    results = engine(target, drafter, Rejection(), drafter.window).submit(list(range(8)), params).results()
    return sum(len(r.token_ids) for r in results) / sum(r.stats.steps for r in results)


def test_where_lines_repeat_copied_guesses_beat_random_ones_and_both_beat_plain() -> None:
    target = Rows(16)
    random, copied = (accepted(Jacobi(6, init, sampled=True), target) for init in ("random", "copy"))
    assert 1.5 < random < copied - 0.3


def test_rows_behind_the_rejected_token_become_the_next_guesses() -> None:
    drafter = Jacobi(4, "repeat")
    history = History([5], SamplingParams(), 9)
    drafter.begin(0, history)
    (tree,) = drafter.propose([0], [Budget(4, 4)], [StreamNoise(0, 0, DRAFT, 0, 0)])
    assert tree.tokens.tolist() == [5, 5, 5, 5, 5] and tree.weights is not None and (np.diff(tree.weights) <= 0).all()
    logits = torch.eye(9)[[5, 6, 7, 8, 1]]  # row i is the prediction after node i
    history.append([5, 6])
    drafter.observe([0], [StepRecord(tree, Verdict((1,), 6), (5, 6), Scores(logits))])
    (tree,) = drafter.propose([0], [Budget(4, 4)], [StreamNoise(0, 0, DRAFT, 1, 1)])
    assert tree.tokens.tolist() == [6, 7, 8, 1, 1]  # predictions of nodes 2, 3 and 4, then a fresh one


def test_own_rows_are_found_in_a_merged_tree() -> None:
    drafter = Jacobi(2, "repeat")
    history = History([5], SamplingParams(), 9)
    drafter.begin(0, history)
    (guessed,) = drafter.propose([0], [Budget(2, 2)], [StreamNoise(0, 0, DRAFT, 0, 0)])
    tree = merge(chain(5, [3, 4]), guessed)  # nodes 1, 2 are another drafter's; ours are 3, 4
    history.append([3])
    drafter.observe([0], [StepRecord(tree, Verdict((), 3), (3,), Scores(torch.eye(9)[[0, 0, 0, 7, 8]]))])
    (tree,) = drafter.propose([0], [Budget(2, 2)], [StreamNoise(0, 0, DRAFT, 1, 1)])
    assert tree.tokens.tolist() == [3, 7, 8]


def test_a_plain_step_moves_the_window_on() -> None:
    drafter = Jacobi(2, "repeat")
    history = History([5], SamplingParams(), 9)
    drafter.begin(0, history)
    drafter._slots[0].guesses = [1, 2]
    history.append([7])
    drafter.observe([0], [StepRecord(root(5), Verdict((), 7), (7,), Scores(torch.zeros(1, 9)))])
    assert drafter.propose([0], [Budget(1, 1)], [StreamNoise(0, 0, DRAFT, 1, 1)])[0].tokens.tolist() == [7, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), max_size=4))
def test_a_continuation_is_what_followed_the_latest_match(text: list[int], drafted: list[int]) -> None:
    whole, size = text + drafted, len(text)

    def matches(n: int) -> list[int]:
        return [end for end in range(n, size) if len(whole) > n and whole[end - n : end] == whole[-n:]]

    place = (matches(2) or matches(1) or [None])[-1]
    want = list(whole)
    for i in range(6):
        want.append(want[-1] if place is None else (want[place + i]))
    found = continuation(np.array(text), np.array(drafted, dtype=np.int64), 6).tolist()
    assert found == want[len(whole) :]
