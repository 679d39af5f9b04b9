"""The two attentions of unrolled training are one: values and gradients of the fused kernel equal those written out."""

from __future__ import annotations

import pytest
import torch

from outrider.train.attention import attend, fused, plain


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fused_attention_equals_plain_in_values_and_gradients(late: int, kv_heads: int) -> None:
    torch.manual_seed(late)

    def some(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 9, 8, dtype=torch.float64, requires_grad=True)

    q = some(4)
    pairs = [(some(kv_heads), some(kv_heads)) for _ in range(late + 1)]
    goal = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    leaves = [q, *(part for pair in pairs for part in pair)]
    results = []
    for way in (plain, fused):
        out = way(q, pairs[0], pairs[1:])
        results.append([out, *torch.autograd.grad((out * goal).sum(), leaves)])
    for got, other in zip(*results, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-9, atol=1e-9)


def test_full_precision_on_a_cpu_is_written_out() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    assert torch.equal(attend(q, (k, v), []), plain(q, (k, v), []))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("late", [0, 5])
def test_fused_attention_in_half_precision_on_a_gpu(late: int) -> None:
    torch.manual_seed(late)

    def some(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 130, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, pairs = some(9), [(some(3), some(3)) for _ in range(late + 1)]
    goal = torch.randn(2, 9, 130, 64, device="cuda")
    leaves = [q, *(part for pair in pairs for part in pair)]
    got = torch.autograd.grad((attend(q, pairs[0], pairs[1:]) * goal).sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = plain(exact[0], (exact[1], exact[2]), list(zip(exact[3::2], exact[4::2], strict=True)))
    for gradient, other in zip(got, torch.autograd.grad((out * goal).sum(), exact), strict=True):
        assert float((gradient.double() - other).norm() / other.norm()) < 0.02
