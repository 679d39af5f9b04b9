"""What a GPU does with all rows of a tree at once equals what is done row by row: laws, and the tokens picked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider import sampling
from outrider.noise import TARGET, StreamNoise, race
from outrider.params import SamplingParams
from outrider.sampling import History, TargetRows
from outrider.tree import fixed
from outrider.verify.invariant import Invariant

VOCAB = 300
TREE = fixed(np.array([5, 7, 9, 11, 12, 3]), np.array([-1, 0, 0, 1, 1, 4]))
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.8, "top_k": 7}, {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.9, "min_p": 0.05}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
]  # fmt: skip


def rows(settings: dict[str, Any]) -> TargetRows:
    torch.manual_seed(1)
    logits = torch.randn(len(TREE), VOCAB) * 3
    logits[2, 10:30] = logits[2, 10]  # ties at the boundary
    return TargetRows(logits, TREE, History([1, 2, 5], SamplingParams(**settings), VOCAB))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_cheap_together", lambda _: True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_laws_together_are_laws_one_by_one(settings: dict[str, Any], as_on_a_gpu: None) -> None:
    made = rows(settings)
    together = made.together()
    assert together is not None
    for node in range(len(TREE)):
        assert torch.equal(together[node] > 0, made.probs(node) > 0)
        assert torch.allclose(together[node], made.probs(node), atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_tokens_are_chosen(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(20):
        noise = StreamNoise(3, 0, TARGET, step, 7 + step)
        want = Invariant().verify(TREE, rows(settings), noise)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "_cheap_together", lambda _: True)
            made = rows(settings)
            laws = made.together()
            assert laws is not None
            one_by_one = [noise.pick(law, TREE.path_tokens(node)) for node, law in enumerate(laws)]
            assert noise.pick_rows(laws, TREE) == one_by_one
            assert Invariant().verify(TREE, made, noise) == want


def test_reshaped_rows_are_left_to_one_by_one(as_on_a_gpu: None) -> None:
    assert rows({"temperature": 1.0, "repetition_penalty": 1.2}).together() is None
    assert rows({"temperature": 0.0}).together() is None
    assert race(torch.tensor([0.0, 1.0, 0.0]), 5) == 1
