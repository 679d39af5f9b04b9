"""A prediction is followed through edits: nearly the whole budget outside, back in step a few tokens behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.protocols import Remembers
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import TokenTree
from outrider.draft.lookup.predicted import CERTAIN, CERTAIN_AFAR, NEAR, Predicted

BUDGET = 16
RANDOM = np.random.default_rng(0)
LINES = [[100 + 20 * i + j for j in range(RANDOM.integers(4, 12))] + [0] for i in range(40)]  # 0 ends a line


def flat(lines: list[list[int]]) -> list[int]:
    return [token for line in lines for token in line]


def agreed(tree: TokenTree, coming: list[int]) -> int:
    """How many coming tokens a greedy target would accept."""
    node = depth = 0
    while depth < len(coming) and (node := tree.child(node, coming[depth])) > 0:
        depth += 1
    return depth


def force(prediction: list[int], output: list[int], prompt: tuple[int, ...] = (1, 2)) -> list[int]:
    """Tokens of each step when the target says exactly `output`."""
    drafter = Predicted()
    history = History(prompt, SamplingParams(prediction=tuple(prediction)), 10_000)
    drafter.begin(0, history)
    gains = []
    while len(history.output) < len(output):
        coming = output[len(history.output) :]
        (tree,) = drafter.propose([0], [Budget(BUDGET, BUDGET)], [])
        assert tree.candidates <= BUDGET and tree.tokens[0] == history.tokens[-1] and not tree.is_sampled
        if tree.weights is not None:
            assert (tree.weights[1:] <= tree.weights[tree.parents[1:]]).all() and (tree.weights[1:] > 0).all()
        emitted = coming[: agreed(tree, coming) + 1]
        history.append(emitted)
        drafter.observe([0], [StepRecord(tree, Verdict((), 0), tuple(emitted), Scores(None))])
        gains.append(len(emitted))
    drafter.end(0)
    return gains


def test_an_unchanged_text_is_accepted_whole() -> None:
    gains = force(flat(LINES), flat(LINES))
    assert all(gain == BUDGET + 1 for gain in gains[:-1])


EDITS = {
    "insert a line": [*LINES[:20], [900, 901, 902, 903, 904, 905, 0], *LINES[20:]],
    "delete a line": [*LINES[:20], *LINES[21:]],
    "delete ten lines": [*LINES[:15], *LINES[25:]],
    "replace a line": [*LINES[:20], [900, 901, 902, 0], *LINES[21:]],
    "move a line to the front": [LINES[20], *LINES[:20], *LINES[21:]],
    "say something first": [[910, 911, 912, 913, 914, 915, 916, 917], *LINES],
    "begin with another token": [[950, *LINES[0][1:]], *LINES[1:]],
    "begin with two tokens for one": [[950, 951, *LINES[0][1:]], *LINES[1:]],
    "begin with one token for two": [[950, *LINES[0][2:]], *LINES[1:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_one_edit_costs_a_few_steps(edit: str) -> None:
    output = flat(EDITS[edit])
    least = -(-len(output) // (BUDGET + 1))  # steps of an unchanged text
    new = sum(token not in flat(LINES) for token in output)
    moved = CERTAIN_AFAR if edit.startswith("move") else 0
    # Each new token takes a step; around the edit a step ends early, and one or two more guess wrong.
    assert len(force(flat(LINES), output)) <= least + new + 4 + moved


def test_a_name_changed_throughout_costs_about_a_step_each() -> None:
    old = [[7, *line] if i % 4 == 0 else line for i, line in enumerate(LINES)]
    output = [8 if token == 7 else token for token in flat(old)]
    gains, changes = force(flat(old), output), output.count(8)
    assert len(gains) <= -(-len(output) // (BUDGET + 1)) + 2 * changes
    assert np.mean(gains) > 8


def test_nothing_is_proposed_without_a_prediction_or_behind_its_end() -> None:
    assert force([], [5, 6, 7]) == [1, 1, 1]
    assert force([5, 6], [5, 6, 7, 8, 9])[1:] == [1, 1]


def test_the_prompt_is_not_mistaken_for_output() -> None:
    assert force([5, 6, 7, 8], [5, 6, 7, 8], prompt=(5, 6, 7, 8, 5, 6))[0] == 4


def test_alternatives_stand_side_by_side_right_after_a_break() -> None:
    """After one token that was not expected: it was inserted (the text goes on), or it replaces the expected one."""
    drafter, expected = Predicted(), list(range(10, 40))
    history = History([1], SamplingParams(prediction=tuple(expected)), 100)
    drafter.begin(0, history)
    history.append([*expected[:10], 90])
    drafter.observe([0], [StepRecord(drafter.propose([0], [Budget(1, 1)], [])[0], Verdict((), 0), (10,), Scores(None))])
    (tree,) = drafter.propose([0], [Budget(8, 8)], [])
    assert {20, 21} <= {int(tree.tokens[i]) for i in tree.children(0)}
    assert drafter.confidence(0) == 0


def test_of_equal_passages_the_next_one_ahead_is_taken() -> None:
    passage = list(range(10, 20))
    drafter = Predicted()
    expected = (*passage, 30, *passage, 31, *passage, 32)
    history = History([1], SamplingParams(prediction=expected), 100)
    drafter.begin(0, history)
    for token in [*passage, 30, *passage[:3], 90, *passage[4:7]]:  # one token of the second passage is another
        history.append([token])
        (tree,) = drafter.propose([0], [Budget(1, 1)], [])
        drafter.observe([0], [StepRecord(tree, Verdict((), 0), (token,), Scores(None))])
    (tree,) = drafter.propose([0], [Budget(5, 5)], [])
    assert tree.tokens.tolist() == [16, 17, 18, 19, 31, 10]


def test_slots_are_independent_and_keep_nothing_after_the_end() -> None:
    drafter = Predicted()
    for slot, prediction in enumerate(((5, 6), (7, 8), ())):
        drafter.begin(slot, History([1], SamplingParams(prediction=prediction), 10))
    trees = drafter.propose([2, 1, 0], [Budget(4, 4)] * 3, [])
    assert [tree.tokens.tolist() for tree in trees] == [[1], [1, 7, 8], [1, 5, 6]]
    drafter.end(1)
    drafter.end(1)
    drafter.begin(1, History([1], SamplingParams(), 10))
    assert drafter.propose([1], [Budget(4, 4)], [])[0].candidates == 0
    assert not isinstance(drafter, Remembers)


small = st.lists(st.integers(0, 4), max_size=30)


@given(small, small, st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_any_prediction_and_any_output_end_without_error(prediction, output, prompt) -> None:
    assert sum(force(prediction, output, tuple(prompt))) == len(output)


edits = st.lists(
    st.tuples(st.integers(0, 299), st.integers(0, 12), st.integers(0, 12)), max_size=5  # where, deleted, inserted
)  # fmt: skip


@given(edits)
def test_random_edits_are_left_behind_within_a_few_tokens(edits) -> None:
    """The output is in step again once `CERTAIN` tokens near the pointer, or `CERTAIN_AFAR`, follow an edit."""
    prediction, fresh = list(range(1000, 1300)), iter(range(2000, 3000))
    text: list[tuple[int, int]] = [(token, i) for i, token in enumerate(prediction)]  # token, its place; -1: new
    for where, deleted, inserted in edits:
        at = min(where, len(text))
        text[at : at + deleted] = [(next(fresh), -1) for _ in range(inserted)]
    drafter = Predicted()
    history = History([1], SamplingParams(prediction=tuple(prediction)), 4000)
    drafter.begin(0, history)
    same = 0  # tokens in a row that follow each other in the prediction
    for i, (token, place) in enumerate(text):
        history.append([token])
        (tree,) = drafter.propose([0], [Budget(1, 1)], [])
        drafter.observe([0], [StepRecord(tree, Verdict((), 0), (token,), Scores(None))])
        same = 0 if place < 0 else same + 1 if i and text[i - 1][1] == place - 1 else 1
        if same >= CERTAIN_AFAR:
            assert drafter._slots[0].pointer == place + 1
        if same >= CERTAIN and sum(deleted for _, deleted, _ in edits) <= NEAR - 12:
            assert drafter._slots[0].pointer == place + 1
