"""The likeliest tokens that a drafter needs come with a recorded step's scores, in its one transfer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.records import Needs, Scores, TopRows
from outrider.draft.table.top_rows import top_of, top_rows
from outrider.runtime.targets import cuda_target, eager_target
from tests.runtime.running import run_trees
from tests.runtime.test_steps import PROMPT, TREE, open_slot, small

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_what_was_asked_for_is_what_the_logits_say() -> None:
    target = cuda_target(small().to(DEVICE), max_slots=4, max_rows=16, warm_up=False)
    slots = [open_slot(target, PROMPT), open_slot(target, PROMPT[:3])]
    for count in (3, 8):
        for scores in run_trees(target, slots, [TREE, TREE.keep([1])], Needs(top=count)):
            assert scores.logits is not None and scores.top is not None and scores.likeliest is not None
            want = top_rows(scores.logits.float().cpu(), count)
            assert np.array_equal(scores.top.ids, want.ids)
            np.testing.assert_allclose(scores.top.logprobs, want.logprobs, atol=1e-4)
            assert list(scores.likeliest) == scores.top.ids[:, 0].tolist()
    assert run_trees(target, slots, [TREE, TREE], Needs())[0].top is None


def test_they_outlive_the_next_step() -> None:
    target = cuda_target(small().to(DEVICE), max_slots=4, max_rows=16, warm_up=False)
    slot = open_slot(target, PROMPT)
    first = run_trees(target, [slot], [TREE], Needs(top=4))[0].top
    assert first is not None
    ids = first.ids.copy()
    target.commit([slot], [[]])
    run_trees(target, [slot], [TREE], Needs(top=4))
    assert np.array_equal(first.ids, ids)


def test_a_target_that_brings_none_is_asked_for_its_logits() -> None:
    target = eager_target(small(), max_slots=1)
    scores = run_trees(target, [open_slot(target, PROMPT)], [TREE], Needs(top=5))[0]
    assert scores.top is None and scores.logits is not None
    found = top_of(scores, 5)
    assert found is not None and np.array_equal(found.ids, top_rows(scores.logits, 5).ids)


@pytest.mark.parametrize("brought", [4, 6])
def test_more_than_needed_is_cut_and_less_is_not_taken(brought: int) -> None:
    logits = torch.arange(20.0)[None]
    told = TopRows(np.full((1, brought), 7, dtype=np.int32), np.zeros((1, brought), dtype=np.float32))
    found = top_of(Scores(logits, top=told), 5)
    assert found is not None and found.ids.flags.c_contiguous
    assert found.ids.tolist() == ([[7] * 5] if brought == 6 else [[19, 18, 17, 16, 15]])


def test_needs_join_and_ask_nothing_of_the_prompt() -> None:
    assert (Needs(top=3) | Needs(hidden=(1,), top=8)).top == 8
    assert not Needs(top=3).of_prompt and Needs(logits=True, top=3).of_prompt
