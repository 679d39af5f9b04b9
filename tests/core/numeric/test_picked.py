"""The race over raw scores chooses what the race over their softmax does, whatever reshapes and truncates them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.noise import DRAFT, StreamNoise, race, uniforms
from outrider.core.numeric.picked import pick_score
from outrider.core.params import SamplingParams
from outrider.core.sampling import History
from outrider.core.target_rows import TargetRows
from outrider.core.tree import chain
from outrider.verify.invariant import Invariant

VOCAB = 97
MERE_ROUNDING = 1e-6


def times(scores: np.ndarray, temperature: float, stream: int) -> np.ndarray:
    """By the formula, in float64."""
    u = uniforms(stream, len(scores), torch.device("cpu")).numpy()
    with np.errstate(over="ignore", divide="ignore"):
        return -np.log1p(-u) / np.exp((scores.astype(np.float64) - scores.max()) / temperature)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32), stream=st.integers(0, 2**64 - 1), size=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]), banned=st.sampled_from([0.0, 0.5, 0.99]),
    temperature=st.sampled_from([1e-5, 0.1, 0.7, 1.0, 3.0]),
)  # fmt: skip
def test_the_same_token_as_the_race_over_the_distribution(
    seed: int, stream: int, size: int, spread: float, banned: float, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = (spread * rng.standard_normal(size)).astype(np.float32)
    scores[rng.random(size) < banned] = -np.inf
    scores[int(rng.integers(size))] = 0.5  # one at least may be chosen
    chosen = int(pick_score(scores, temperature, np.uint64(stream)))
    all_times = times(scores, temperature, stream)
    assert all_times[chosen] <= all_times.min() * (1 + 1e-12) and scores[chosen] > -np.inf
    scalar = race(torch.softmax(torch.from_numpy(scores / np.float32(temperature)), 0), stream)
    assert scalar == chosen or abs(all_times[scalar] / all_times[chosen] - 1) < max(MERE_ROUNDING, 1e-6 / temperature)


def test_tokens_are_chosen_as_often_as_they_are_likely() -> None:
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    counts = np.bincount([int(pick_score(scores, 1.0, np.uint64(key * 7919))) for key in range(20_000)], minlength=4)
    assert np.abs(counts / 20_000 - [0.5, 0.3, 0.15, 0.05]).max() < 0.015  # four standard deviations


SETTINGS = [
    {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3, "top_k": 20},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4}, {"logit_bias": {3: 2.0, 9: -50.0}}, {"min_new_tokens": 4},
    {"bad_words": ((1,), (2, 3))}, {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
]  # fmt: skip


@pytest.mark.parametrize("given_params", SETTINGS, ids=str)
def test_every_setting_says_what_the_scalar_race_says(given_params: dict[str, object]) -> None:
    differing = 0
    for case in range(60):
        rng = np.random.default_rng(case)
        params = SamplingParams(temperature=0.8, seed=case, **given_params)  # type: ignore[arg-type]
        history = History([5, 6, 7], params, VOCAB, frozenset({0, 4}))
        history.append(rng.integers(VOCAB, size=2).tolist())
        tree = chain(int(history.tokens[-1]), rng.integers(VOCAB, size=3).tolist())
        logits = torch.from_numpy((2 * rng.standard_normal((4, VOCAB))).astype(np.float32))
        noise = StreamNoise(case, 0, DRAFT, history.hash, len(history.tokens))
        for node in range(4):
            path = tree.path_tokens(node)
            scalar = race(torch.softmax(history.process(logits[node], path), 0), noise.target_key(path))
            differing += TargetRows(logits, tree, history).pick(node, path, noise) != scalar
        token = TargetRows(logits, tree, history).pick(0, (), noise)
        agreeing = chain(int(history.tokens[-1]), [token])
        verdict = Invariant().verify(agreeing, TargetRows(logits[:2], agreeing, history), noise)
        assert verdict.path == (1,)
    assert differing == 0
