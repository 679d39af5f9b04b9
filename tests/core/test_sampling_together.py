"""What a GPU does with all rows of a tree at once equals what is done row by row, probabilities and picked tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.core import sampling, target_rows, warping
from outrider.core.noise import TARGET, StreamNoise, race
from outrider.core.params import SamplingParams
from outrider.core.sampling import History
from outrider.core.target_rows import TargetRows
from outrider.core.tree import fixed
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
    for module in (sampling, target_rows, warping):
        monkeypatch.setattr(module, "cheap_together", lambda _: True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_distributions_together_are_distributions_one_by_one(settings: dict[str, Any], as_on_a_gpu: None) -> None:
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
            for module in (sampling, target_rows, warping):
                patch.setattr(module, "cheap_together", lambda _: True)
            made = rows(settings)
            probs = made.together()
            assert probs is not None
            one_by_one = [noise.pick(row, TREE.path_tokens(node)) for node, row in enumerate(probs)]
            assert noise.pick_rows(probs, TREE) == one_by_one
            assert Invariant().verify(TREE, made, noise) == want


def test_reshaped_rows_are_left_to_one_by_one(as_on_a_gpu: None) -> None:
    assert rows({"temperature": 1.0, "repetition_penalty": 1.2}).together() is None
    assert rows({"temperature": 0.0}).together() is None
    assert race(torch.tensor([0.0, 1.0, 0.0]), 5) == 1
