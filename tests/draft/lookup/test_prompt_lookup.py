"""Prompt lookup equals a quadratic oracle, never matches itself, and gains where there is something to copy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import root
from outrider.draft.lookup.prompt_lookup import PromptLookup

RECORD = StepRecord(root(0), Verdict((), 0), (), Scores(None))


def oracle(tokens: list[int], longest: int, shortest: int, length: int) -> list[int]:
    """The latest earlier occurrence of the longest suffix that has one; the text goes on as its own copy."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(length):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(tokens, st.lists(tokens, max_size=5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_proposals_equal_the_quadratic_oracle_while_the_text_grows(prompt, steps, longest, shortest, length) -> None:
    shortest = min(shortest, longest)
    drafter = PromptLookup(longest, shortest)
    history = History(prompt, SamplingParams(), 8)
    drafter.begin(0, history)
    for more in [[], *steps]:
        history.append(more)
        drafter.observe([0], [RECORD])
        (tree,) = drafter.propose([0], [Budget(length, length)], [])
        text = history.tokens.tolist()
        assert tree.tokens.tolist() == [text[-1], *oracle(text, longest, shortest, length)]
        assert tree.is_chain and not tree.is_sampled


def test_the_budget_bounds_nodes_and_depth() -> None:
    drafter = PromptLookup()
    drafter.begin(0, History([1, 2, 3, 4, 5, 1, 2], SamplingParams(), 8))
    for budget in (Budget(2, 9), Budget(9, 2)):
        assert drafter.propose([0], [budget], [])[0].tokens.tolist() == [2, 3, 4]


def test_slots_do_not_see_each_other() -> None:
    drafter = PromptLookup()
    drafter.begin(0, History([1, 2, 3, 1, 2], SamplingParams(), 8))
    drafter.begin(1, History([1, 2, 7, 1, 2], SamplingParams(), 8))
    first, second = drafter.propose([0, 1], [Budget(1, 1)] * 2, [])
    assert (first.tokens[1], second.tokens[1]) == (3, 7)
    drafter.end(0)
    assert drafter.propose([1], [Budget(1, 1)], [])[0].tokens.tolist() == [2, 7]


def test_a_copied_text_is_proposed_whole() -> None:
    text = np.random.default_rng(0).permutation(200).tolist()
    drafter = PromptLookup()
    history = History([*text, *text[:3]], SamplingParams(), 200)
    drafter.begin(0, history)
    assert drafter.propose([0], [Budget(50, 50)], [])[0].tokens[1:].tolist() == text[3:53]
