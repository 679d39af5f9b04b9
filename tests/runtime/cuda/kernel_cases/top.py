"""The likeliest tokens of rows against plain torch; `test_kernels.py` runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch

from outrider.runtime.cuda import reference
from outrider.runtime.cuda.top import STRETCH, top

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.mark.parametrize("width", [5, 300, STRETCH, 3 * STRETCH + 17])
@pytest.mark.parametrize("count", [1, 8, 10])
@pytest.mark.parametrize("heated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if GPU else torch.float16])
def test_ids_and_log_probabilities(width: int, count: int, heated: bool, dtype: torch.dtype) -> None:
    """Half precision has many equals: the lower id comes first."""
    torch.manual_seed(width + count)
    logits = (3 * torch.randn(2, 3, width, device=DEVICE)).to(dtype)
    logits[0, 0, width // 2 :] = -torch.inf
    logits[0, 1] = 0.0
    logits[0, 1, ::2] = -0.0
    temperature = torch.rand(6, device=DEVICE) + 0.5 if heated else None
    got, want = top(logits, count, temperature), reference.top(logits, count, temperature)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1].view(torch.float32), want[1].view(torch.float32), atol=1e-5, rtol=1e-5)


def test_one_temperature_for_all_rows() -> None:
    """Expanded, not copied."""
    logits, temperature = torch.randn(5, 40, device=DEVICE), torch.full((1,), 0.5, device=DEVICE).expand(5)
    assert torch.equal(top(logits, 4, temperature)[0], reference.top(logits, 4, temperature)[0])
    assert top(logits, 4, temperature)[1].view(torch.float32).isfinite().all()


def test_the_reference_is_a_sorted_log_softmax() -> None:
    logits = torch.randn(4, 50, dtype=torch.float64)
    ids, bits = reference.top(logits, 6)
    logprobs, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(ids.long(), order[:, :6])
    torch.testing.assert_close(bits.view(torch.float32).double(), logprobs[:, :6], atol=1e-5, rtol=1e-5)
