"""Suggestions: they grow a token at a time, one alone is greedy text, and the slot is given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.errors import InputError
from outrider.core.rows.superposed import Superposition
from outrider.runtime.targets import eager_target
from outrider.search.suggestions import suggestions
from tests.watched import llama


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(1)


def test_each_stage_is_a_token_longer_and_the_slot_is_free_again(model: Any) -> None:
    target, embed = eager_target(model, max_slots=1), model.get_input_embeddings()
    for _ in range(2):
        stages = list(suggestions(target, [3, 1, 4, 1, 5], embed, 4, 6))
        assert [len(stage[0].tokens) for stage in stages] == [1, 2, 3, 4, 5, 6]
        assert all(len(stage) == 4 and sum(one.share for one in stage) == pytest.approx(1) for stage in stages)
        assert target.free_slots == 1
    for _ in suggestions(target, [3, 1], embed, 2, 6):
        break
    assert target.free_slots == 1


def test_one_suggestion_without_ngrams_is_greedy_text(model: Any) -> None:
    target, text = eager_target(model, max_slots=1), [3, 1, 4, 1, 5]
    how = Superposition(alpha=0)
    *_, (one,) = suggestions(target, text, model.get_input_embeddings(), 1, 7, how=how)
    with torch.no_grad():
        for _ in range(7):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert list(one.tokens) == text[5:] and one.share == 1


def test_suggestions_that_end_are_kept_beside_those_that_go_on(model: Any) -> None:
    target, embed = eager_target(model, max_slots=1), model.get_input_embeddings()
    (first, *_), *_ = suggestions(target, [3, 1, 4], embed, 3, 1)
    found = list(suggestions(target, [3, 1, 4], embed, 3, 3, ends=frozenset(first.tokens)))
    assert any(one.ended and one.tokens == first.tokens for one in found[0]) and len(found[-1]) == 3


def test_what_cannot_be_run_is_refused(model: Any) -> None:
    target, embed = eager_target(model, max_slots=1, max_context=16), model.get_input_embeddings()
    with pytest.raises(InputError, match="leaves no room in a context of 16"):
        next(suggestions(target, [1] * 16, embed))
    target.traits = replace(target.traits, side_rows=False)
    with pytest.raises(InputError, match="does not run rows of mixed embeddings"):
        next(suggestions(target, [1], embed))
