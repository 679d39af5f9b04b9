"""Loops in text that is being written: seen where the definition says, and turns end there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.models import LoadedModel
from outrider.train.loops import FARTHEST, Loops
from outrider.train.text.dialogue import FORCED, Dialogue, Piece
from outrider.train.text.selfdata import DataPlan, sample_shard


def said_again(turn: list[int], enough: int) -> bool:
    """The definition: the last `enough` tokens of the turn stand in it once more, further to the left."""
    last = turn[-enough:]
    starts = range(max(0, len(turn) - enough - FARTHEST), len(turn) - enough)
    return len(last) == enough and any(turn[i : i + enough] == last for i in starts)


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4), st.integers(1, 6))
def test_a_loop_is_what_the_definition_says_and_never_reaches_over_a_turn(turns: list[list[int]], enough: int) -> None:
    tokens, places = [9], [0]
    for turn in turns:
        tokens += [*turn, 1]  # a mark that is forced between turns, and also a word of theirs
        places += [*range(1, len(turn) + 1), 0]
    row, loops = torch.tensor([tokens]), Loops(1, enough, torch.device("cpu"))
    for at in range(1, len(tokens)):
        said = tokens[at - places[at] + 1 : at + 1] if places[at] else []
        assert bool(loops.add(row, at, torch.tensor([places[at]]))[0]) == said_again(said, enough), tokens[: at + 1]


@pytest.mark.parametrize("back", [FARTHEST, FARTHEST + 1])
def test_loops_are_seen_as_far_back_as_is_told(back: int) -> None:
    row, loops = torch.tensor([[9, *range(100, 100 + back), *range(100, 110)]]), Loops(1, 10, torch.device("cpu"))
    seen = [bool(loops.add(row, at, torch.tensor([at]))[0]) for at in range(1, row.shape[1])]
    assert seen == [False] * (len(seen) - 1) + [back == FARTHEST]


def test_turns_that_loop_are_ended_there(tiny_llama: LoadedModel) -> None:
    pieces = (Piece((7, 8), True, then=(0,)),)
    script = Dialogue(pieces, (0,), frozenset({63}))

    def answers(loop: int, temperature: float) -> list[list[int]]:
        plan = DataPlan(tokens=1, length=160, batch=4, loop=loop, most=120, answer_temperatures=(temperature,))
        made = sample_shard(tiny_llama.model, script, plan, 0, lambda step: None)
        turns: list[list[int]] = []
        for tokens, roles in zip(made.tokens.tolist(), made.roles.tolist(), strict=True):
            said: list[int] = []
            for token, role in zip(tokens[2:], roles[2:], strict=True):
                if role == FORCED:
                    turns += [said] if said else []
                    said = []
                else:
                    said.append(token)
        return turns

    greedy = answers(6, 0.0)
    assert greedy and all(len(turn) < 60 for turn in greedy)
    looped = [turn for turn in greedy if said_again(turn[:-1], 6)]  # the others came to an end by themselves
    assert len(looped) > 4 and not any(said_again(turn[:n], 6) for turn in greedy for n in range(len(turn) - 1))
    assert any(said_again(turn[:-20], 6) for turn in answers(0, 0.0))
