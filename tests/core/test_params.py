"""Sampling parameters: bad ones are refused by name, good ones become plain values."""

import math

import numpy as np
import pytest

from outrider.core.errors import InputError
from outrider.core.sampling import History, SamplingParams

V = 40
INF = math.inf


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": INF},
        {"temperature": 1e-9},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1},
        {"presence_penalty": INF},
        {"frequency_penalty": None},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: INF}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": [1]},
        {"bad_words": [[]]},
        {"bad_words": [1]},
        {"bad_words": "no"},
        {"bad_words": [[-4]]},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.5},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": 5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 5},
        {"ignore_eos": 1},
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"max_new_tokens": 0},
        {"n": 0},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_a_bad_parameter_is_refused_by_name_in_one_line(bad: dict) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**bad)
    name = "stop" if "stop" in bad else next(iter(bad))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_ids_outside_the_vocabulary_are_refused_when_a_sequence_begins() -> None:
    for options in ({"logit_bias": {V: 1.0}}, {"bad_words": [[1, V]]}):
        with pytest.raises(InputError, match=f"{V}.*{V - 1}"):
            History([1], SamplingParams(**options), V)


def test_lists_become_tuples_and_numpy_numbers_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop="end", stop_token_ids=[1], bad_words=[[1, 2]]
    )
    assert params.stop == ("end",) and params.stop_token_ids == (1,) and params.bad_words == ((1, 2),)
    assert type(params.temperature) is float and type(params.top_k) is int and not params.greedy
    assert hash(params) == hash(params.with_()) and params == params.with_()


def test_with_changes_and_checks_again() -> None:
    params = SamplingParams(seed=4).with_(temperature=0.7)
    assert (params.seed, params.temperature) == (4, 0.7)
    with pytest.raises(InputError, match="top_p"):
        params.with_(top_p=2)
    with pytest.raises(InputError, match="topp"):
        params.with_(topp=0.5)
