"""Losses equal their closed forms, and what a draft would reach equals what a simulated decoder reaches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.train.acceptance import accepted_length, rows_over, stand_rates
from outrider.train.losses import LOSSES, acceptance


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 7), torch.randn(5, 7, requires_grad=True)


def test_losses_equal_their_definitions(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    p_logits, q_logits = logits
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    expected = {"kl": (p * (p / q).log()).sum(-1), "tvd": 1 - torch.minimum(p, q).sum(-1)}
    expected["mix"] = expected["kl"] + expected["tvd"]
    for name, loss in LOSSES.items():
        torch.testing.assert_close(loss(p_logits, q_logits).double(), expected[name], atol=1e-6, rtol=1e-5)
        assert loss(p_logits, p_logits).abs().max() < 1e-6


def test_the_gradient_of_kl_is_q_minus_p_and_never_reaches_the_target(
    logits: tuple[torch.Tensor, torch.Tensor],
) -> None:
    p_logits, q_logits = logits[0].requires_grad_(True), logits[1]
    for loss in LOSSES.values():
        q_logits.grad = None
        loss(p_logits, q_logits).sum().backward()
        assert p_logits.grad is None
        assert q_logits.grad is not None and q_logits.grad.abs().max() > 1e-3
    q_logits.grad = None
    LOSSES["kl"](p_logits, q_logits).sum().backward()
    torch.testing.assert_close(q_logits.grad, (q_logits.softmax(-1) - p_logits.softmax(-1)).detach())


def test_acceptance_is_agreement_and_overlap(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    greedy, drawn = acceptance(*logits)
    p, q = (x.detach().softmax(-1) for x in logits)
    assert greedy.tolist() == [float(a == b) for a, b in zip(p.argmax(-1), q.argmax(-1), strict=True)]
    torch.testing.assert_close(drawn, torch.minimum(p, q).sum(-1))


def test_drawn_rates_average_to_the_overlap_over_text_of_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    p_row, q_row = torch.randn(6, generator=generator), torch.randn(6, generator=generator)
    said = torch.multinomial(p_row.softmax(-1), 20_000, replacement=True, generator=generator)
    _, drawn = stand_rates(p_row.expand(len(said), 6), q_row.expand(len(said), 6), said)
    overlap = float(torch.minimum(p_row.softmax(-1), q_row.softmax(-1)).sum())
    assert abs(float(drawn.mean()) - overlap) < 4 * 0.5 / len(said) ** 0.5  # four standard errors


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_accepted_length_equals_a_simulated_decoder(depth: int) -> None:
    rng = np.random.default_rng(depth)
    texts = [rng.random(40), (rng.random(60) < 0.6).astype(float)]
    runs, steps = 3000, 0
    for rates in texts:
        for _ in range(runs):
            at = 0
            while at < len(rates):
                steps += 1
                taken = 0
                while taken < depth and at < len(rates) and rng.random() < rates[at]:
                    at, taken = at + 1, taken + 1
                at += 1  # the target's own token
    assert accepted_length(texts, depth) == pytest.approx(runs * sum(map(len, texts)) / steps, rel=0.01)


def test_accepted_length_at_its_ends() -> None:
    assert accepted_length([np.zeros(50)], 4) == 1.0
    assert accepted_length([np.ones(50)], 4) == 5.0


def test_rows_predict_the_tokens_they_stand_for(tiny_llama) -> None:
    tokens = torch.arange(3, 12)
    rows = rows_over(tiny_llama.model, tokens, 4)
    whole = tiny_llama.model(tokens[None]).logits[0]
    torch.testing.assert_close(rows, whole[3:8])
