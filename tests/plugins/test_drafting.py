"""Drafts for other engines: right where a text repeats, within their room, and learnt from what came."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.errors import InputError
from outrider.plugins.drafting import Text, TokenDrafter

LOOP = np.array(list(range(20)) * 8, dtype=np.int64)


class Clock:
    """Steps that take 10 ms and 0.2 ms more for each row."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(drafter: TokenDrafter, clock: Clock, text: np.ndarray, start: int, name: str = "a") -> list[int]:
    """Decode a text that is known beforehand; the tokens of each step."""
    place, gains = start, []
    while place < len(text):
        tree = drafter.draft({name: text[:place]}, {name: drafter.most})[name]
        assert tree.tokens[0] == text[place - 1]
        node, gain = 0, 1
        while gain <= len(text) - place - 1:
            right = [child for child in tree.children(node) if tree.tokens[child] == text[place + gain - 1]]
            if not right:
                break
            node, gain = right[0], gain + 1
        gains.append(gain)
        place += gain
        clock.now += 0.01 + 0.0002 * len(tree)
    return gains


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_text_that_repeats_itself_is_drafted(clock: Clock) -> None:
    gains = run(TokenDrafter(8, clock=clock), clock, LOOP, 45)
    assert max(gains) == 9 and np.mean(gains) > 5


def test_a_text_without_repetition_costs_few_candidates(clock: Clock) -> None:
    drafter, drafted = TokenDrafter(8, clock=clock), 0
    text = np.random.default_rng(0).permutation(4000).astype(np.int64)
    for place in range(100, 300):
        drafted += drafter.draft({"a": text[:place]}, {"a": 8})["a"].candidates
        clock.now += 0.01
    assert drafted < 20


def test_a_drafter_that_needs_a_model_is_told_that_there_is_none() -> None:
    with pytest.raises(InputError, match="drafts from tokens alone"):
        Text(LOOP, ()).draft_rows(torch.zeros(1, 4), [()], 4)


def test_wrong_drafts_are_given_up(clock: Clock) -> None:
    """A text whose repetitions mislead: what followed before never follows again."""
    drafter, drafted = TokenDrafter(8, clock=clock), []
    tokens = [token for i in range(400) for token in (1, 2, 100 + i)]
    text = np.array(tokens, dtype=np.int64)
    for place in range(30, len(text)):
        tree = drafter.draft({"a": text[:place]}, {"a": 8})["a"]
        drafted.append(tree.candidates)
        clock.now += 0.01 + 0.005 * len(tree)
    assert np.mean(drafted[-300:]) < 1.5


def test_what_one_request_said_is_drafted_for_the_next(clock: Clock) -> None:
    drafter = TokenDrafter(8, clock=clock)
    text = np.random.default_rng(1).permutation(300).astype(np.int64)
    first = run(drafter, clock, text, 10)
    drafter.draft({}, {})  # it has ended
    second = run(drafter, clock, text, 10, "b")
    assert sum(first) == sum(second) and len(second) < len(first) / 3


def test_no_draft_is_longer_than_its_room_or_branches(clock: Clock) -> None:
    drafter = TokenDrafter(8, clock=clock)
    for room in (8, 3, 1, 0, 5):
        tree = drafter.draft({"a": LOOP[: 60 + room]}, {"a": room})["a"]
        assert tree.candidates <= room and tree.depth == tree.candidates
        clock.now += 0.01


def test_requests_of_a_batch_come_and_go(clock: Clock) -> None:
    drafter = TokenDrafter(4, clock=clock)
    for step in range(40):
        names = [name for name in "abcde" if (step + ord(name)) % 7 > 1]
        texts = {name: LOOP[: 40 + step] + ord(name) for name in names}
        trees = drafter.draft(texts, dict.fromkeys(names, 4))
        assert list(trees) == names
        clock.now += 0.02
    drafter.draft({}, {})
    assert not drafter._requests
