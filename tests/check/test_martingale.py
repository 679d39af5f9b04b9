"""The martingale statistics on tables: quiet for the exact rule, loud for each way of getting it wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.check.martingale import ACCEPTED, Martingale, distribution_if_wrong, draws_along
from outrider.core.noise import VERIFY, StreamNoise
from outrider.core.records import Scores, StepRecord, Verdict
from outrider.core.tree import Draw, QRow, chain
from outrider.verify import rejection
from outrider.verify.rejection import Rejection

VOCAB, TEXTS, TOKENS = 30, 40, 50


class _Rows:
    greedy = False

    def __init__(self, p: np.ndarray) -> None:
        self._p = torch.from_numpy(p)

    def probs(self, node: int) -> Tensor:
        return self._p


def sampled(reuse: bool = False, report: float = 1.0) -> Martingale:
    """Texts of one-token drafts. `report` flattens the row that is claimed against the one that was drawn from."""
    rng = np.random.default_rng(0)
    sums = Martingale()
    for text in range(TEXTS):
        so_far: dict[str, float] = {}
        for step in range(TOKENS):
            p, q = rng.dirichlet(np.full(VOCAB, 0.3)), rng.dirichlet(np.full(VOCAB, 0.3))
            q = 0.3 * p + 0.7 * q
            claimed = q**report / (q**report).sum()
            row = QRow(np.arange(VOCAB), claimed)
            draft = int(rng.choice(VOCAB, p=q))
            tree = chain(0, [draft], [row])
            noise = StreamNoise(text, 0, VERIFY, 0 if reuse else step, 0)
            verdict = Rejection().verify(tree, _Rows(p), noise)
            token = draft if verdict.path else verdict.next_token
            sums._token(p, token, tree.draws[0], so_far)
    return sums


def test_exact_rule_is_quiet_and_the_power_is_stated() -> None:
    sums = sampled()
    assert sums.passed and max(abs(s.z) for s in sums.statistics.values()) < 3.5
    assert sums.best_power > 0.99 and sums.drafted == TEXTS * TOKENS


def test_wrong_residual_is_loud_and_as_loud_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = sampled().statistics["min(1, q/p)"].z_if_wrong
    monkeypatch.setattr(rejection, "after_rejection", lambda left, mass, row: (left, mass))
    sums = sampled()
    assert not sums.passed
    assert abs(sums.statistics["min(1, q/p)"].z - predicted) < 4


def test_reused_noise_is_loud_in_a_repeating_statistic() -> None:
    assert any("repeating" in s.name for s in sampled(reuse=True).refuting)


def test_row_that_the_draft_was_not_drawn_from_is_loud() -> None:
    """A flattened row is still close to p; one that is a stranger to the draw shows in the acceptance itself."""
    assert not sampled(report=0.5).passed
    assert ACCEPTED in {s.name for s in sampled(report=0.0).refuting}


def test_draws_are_lined_up_with_the_tokens_they_decided() -> None:
    rows = [QRow(np.arange(3), np.full(3, 1 / 3)) for _ in range(3)]
    tree = chain(0, [1, 2, 1], rows)
    step = StepRecord(tree, Verdict((1, 2), 0), (1, 2, 0), Scores(None))
    assert draws_along([step], "rejection") == list(tree.draws[:3])
    assert draws_along([step], "block") == [
        tree.draws[0],
        (),
        (),
    ]  # only the first token of a step is safe to condition
    cut = StepRecord(tree, Verdict((1, 2, 3), 0), (1, 2), Scores(None))
    assert draws_along([step, cut], "rejection") == [*tree.draws[:3], *tree.draws[:2]]


def test_distribution_if_wrong_is_the_distribution_of_the_bug() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    want = np.array([0.1, 0.1, 0.2]) + 0.6 * p  # accepted, or rejected and drawn afresh
    draws = [Draw(0, 1, QRow(np.arange(3), q))]
    assert np.allclose(distribution_if_wrong(p, draws), want) and np.isclose(want.sum(), 1)
    assert np.allclose(distribution_if_wrong(p, []), p)
