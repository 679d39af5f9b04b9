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


def closed_forms(p: torch.Tensor, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """The definitions, from probabilities."""
    m = (p + q) / 2
    kl, tvd = (p * (p / q).log()).sum(-1), 1 - torch.minimum(p, q).sum(-1)
    better = (p > q).double()
    mean = (q * better).sum(-1).mean()
    spread = (q * (better - mean) ** 2).sum(-1).mean().sqrt()
    return {
        "kl": kl, "rkl": (q * (q / p).log()).sum(-1), "tvd": tvd, "mix": kl + tvd, "nla": -(1 - tvd).log(),
        "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        "ce": -q[torch.arange(len(q)), p.argmax(-1)].log(),
        "tvdpp": -(q * (better - mean) / (spread + 1e-6) * q.log()).sum(-1),
    }  # fmt: skip


def test_losses_equal_their_definitions(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    p_logits, q_logits = logits
    expected = closed_forms(p_logits.double().softmax(-1), q_logits.double().softmax(-1))
    assert expected.keys() == LOSSES.keys()
    for name, loss in LOSSES.items():
        torch.testing.assert_close(loss(p_logits, q_logits).double(), expected[name], atol=1e-5, rtol=1e-5)
        wide = loss(p_logits.double(), q_logits.double())
        torch.testing.assert_close(wide, expected[name], atol=1e-10, rtol=1e-9, msg=name)
        if name not in ("ce", "tvdpp"):  # divergences, all but these two: zero for equal distributions only
            assert loss(p_logits, p_logits).abs().max() < 1e-6 and wide.min() > 1e-3


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "tvdpp"])
def test_gradients_equal_finite_differences(name: str, logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    p_logits, q_logits = logits[0].double(), logits[1].detach().double().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda q: LOSSES[name](p_logits, q), (q_logits,), eps=1e-6, atol=1e-7)


def test_the_gradient_of_tvdpp_is_a_policy_gradient_and_parallel_to_that_of_tvd() -> None:
    """Of logit j in row t: -E_q[A (1[x = j] - q_j)], rewards and q held fixed; tvd's is the same without the scale."""
    torch.manual_seed(1)
    p_logits = torch.randn(6, 9, dtype=torch.float64)
    q_logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    p, q = p_logits.softmax(-1), q_logits.detach().softmax(-1)
    reward = (p > q).double()
    mean = (q * reward).sum(-1).mean()
    spread = (q * (reward - mean) ** 2).sum(-1).mean().sqrt()
    gradients = {}
    for name in ("tvd", "tvdpp"):
        (gradients[name],) = torch.autograd.grad(LOSSES[name](p_logits, q_logits).sum(), q_logits)
    for name, advantage in (("tvd", reward), ("tvdpp", (reward - mean) / (spread + 1e-6))):
        expected = torch.zeros_like(q)
        for x in range(9):
            one_hot = torch.nn.functional.one_hot(torch.tensor(x), 9).double()
            expected -= q[:, x : x + 1] * advantage[:, x : x + 1] * (one_hot - q)
        torch.testing.assert_close(gradients[name], expected)
    torch.testing.assert_close(gradients["tvdpp"] * (spread + 1e-6), gradients["tvd"])


def test_tvdpp_with_equal_rewards_is_finite_and_teaches_nothing() -> None:
    p_logits = torch.randn(3, 5)
    q_logits = p_logits.clone().requires_grad_(True)  # a tie is no reward
    LOSSES["tvdpp"](p_logits, q_logits).sum().backward()
    assert q_logits.grad is not None and not q_logits.grad.any()


def test_divergences_know_their_bounds_and_which_distribution_is_which() -> None:
    p_logits, q_logits = torch.tensor([[50.0, 0.0, 0.0]]), torch.tensor([[0.0, 50.0, 0.0]])
    assert float(LOSSES["tvd"](p_logits, q_logits)) == pytest.approx(1)
    assert float(LOSSES["jsd"](p_logits, q_logits)) == pytest.approx(np.log(2))
    assert LOSSES["nla"](p_logits, q_logits).isfinite().all()  # where the product of probabilities would vanish
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(LOSSES["jsd"](a, b), LOSSES["jsd"](b, a))
    torch.testing.assert_close(LOSSES["rkl"](a, b), LOSSES["kl"](b, a))


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
