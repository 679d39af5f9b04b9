"""Stopping criteria of a batch are asked as transformers asks them, however far single rows have run ahead."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StoppingCriteria

import outrider
from tests.dropin.test_dropin import EOS, Recorder, accept_all, padded_batch, speculate, tiny  # noqa: F401

MANY_ENDS = list(range(2, 30))
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "transformers.md"


class Watching(StoppingCriteria):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.asked.append(input_ids.tolist())
        return torch.tensor([self.stops(row, input_ids) for row in range(len(input_ids))])

    def stops(self, row: int, batch: Tensor) -> bool:
        raise NotImplementedError


class AfterCalls(Watching):
    """Stops everything at its seventh call."""

    def stops(self, row: int, batch: Tensor) -> bool:
        return len(self.asked) >= 7


class AfterCallsOneByOne(Watching):
    """Every fourth call stops another row."""

    def stops(self, row: int, batch: Tensor) -> bool:
        return len(self.asked) >= 4 * (row + 1)


class Alike(Watching):
    """Compares a row with the others: stops those whose last token is the batch's largest."""

    def stops(self, row: int, batch: Tensor) -> bool:
        return bool(batch[row, -1] == batch[:, -1].max()) and batch.shape[1] > 12


def both(model: Any, kind: type[Watching], method: dict[str, Any], **call: Any) -> tuple[Tensor, Tensor]:
    """What Outrider and transformers say; checks that both asked the same."""
    ours, theirs = kind(), kind()
    got = model.generate(**call, stopping_criteria=[ours], custom_generate=speculate, **method)
    want = model.generate(**call, stopping_criteria=[theirs])
    assert ours.asked == theirs.asked
    return got, want


@pytest.mark.parametrize("eos", [EOS, None, MANY_ENDS], ids=["eos", "no-eos", "many-eos"])
@pytest.mark.parametrize("kind", [AfterCalls, AfterCallsOneByOne, Alike])
def test_a_criterion_of_a_batch_is_asked_once_a_position_about_all_rows(
    kind: type[Watching],
    eos: Any,
    accept_all: Any,  # noqa: F811
) -> None:
    model = copy.deepcopy(tiny("llama"))
    full = model.generate(**padded_batch(), max_new_tokens=20, eos_token_id=None)
    call = {**padded_batch(), "max_new_tokens": 20, "eos_token_id": eos}
    for method in (accept_all(full, 9), {"method": "plain"}):
        for slots in ({}, {"max_slots": 1}):
            got, want = both(model, kind, {**method, **slots}, **call)
            assert torch.equal(got, want), (method, slots)


def test_rows_of_unequal_speed_are_asked_about_together(accept_all: Any) -> None:  # noqa: F811
    model = copy.deepcopy(tiny("llama"))
    call = {**padded_batch(), "max_new_tokens": 20, "eos_token_id": None}
    full = model.generate(**call)
    wrong = full.clone()
    wrong[1:, 9:] = 3  # only the first row's answer is known: it runs ahead of the others
    got, want = both(model, AfterCalls, accept_all(wrong, 9), **call)
    assert torch.equal(got, want) and got.shape[1] == 9 + 7


@pytest.mark.parametrize("eos", [EOS, MANY_ENDS])
def test_scores_and_streamer_end_where_the_batch_was_stopped(eos: Any, accept_all: Any) -> None:  # noqa: F811
    model = copy.deepcopy(tiny("llama"))
    full = model.generate(**padded_batch(), max_new_tokens=20, eos_token_id=None)
    call = {**padded_batch(), "max_new_tokens": 20, "eos_token_id": eos, "return_dict_in_generate": True}
    call |= {"output_scores": True, "output_logits": True}
    heard = Recorder(), Recorder()
    method = {"custom_generate": speculate, **accept_all(full, 9)}
    got = model.generate(**call, stopping_criteria=[AfterCalls()], streamer=heard[0], **method)
    want = model.generate(**call, stopping_criteria=[AfterCalls()], streamer=heard[1])
    assert torch.equal(got.sequences, want.sequences) and heard[0].got == heard[1].got
    assert len(got.scores) == len(want.scores) == len(got.logits) == len(want.logits)
    torch.testing.assert_close(got.scores[0], want.scores[0], rtol=1e-4, atol=1e-4)


def test_a_time_limit_counts_for_rows_that_wait_for_a_slot() -> None:
    model = copy.deepcopy(tiny("llama"))
    over = MaxTimeCriteria(max_time=-1.0)
    got = model.generate(
        **padded_batch(), max_new_tokens=20, stopping_criteria=[over], custom_generate=speculate, max_slots=1
    )
    assert got.shape[1] == 9 + 1


def test_the_page_names_the_defaults_that_the_code_has() -> None:
    named = {
        name: default
        for names, default in re.findall(r"^\| (`.*?) \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    of = inspect.signature(outrider.generate).parameters
    assert named["method"] == f"`{of['method'].default}`"
    assert named["max_slots"] == str(of["max_slots"].default)
    assert named["cache_bytes"] == f"{of['cache_bytes'].default >> 30} GiB"
    assert named["strict"] == f"`{of['strict'].default}`"
    keywords = {name for name, p in of.items() if p.kind is p.KEYWORD_ONLY}
    assert set(named) == keywords
