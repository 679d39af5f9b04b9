"""A gated pair of projections that a kernel computes in one launch; its own numbers are in kernel_cases."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from outrider.runtime.cuda import reference
from outrider.runtime.cuda import source as cuda_source
from outrider.runtime.cuda.fusion import Fusion, real
from outrider.runtime.cuda.source import Unavailable
from tests.runtime.cuda.test_joined_weights import tiny_llama


@torch.inference_mode()
@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_that_a_kernel_takes_is_one_call_and_silu_is_of_the_gate(
    swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_llama(), torch.arange(6)[None]
    plain = model(ids).logits
    fusion = Fusion(model, reference, lambda: model(ids))
    calls = []

    def gated(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        calls.append("gated")
        if swapped:
            first, second = second, first
        return silu(linear(x, first)) * linear(x, second)

    monkeypatch.setattr(reference, "streams", lambda *_: False)
    monkeypatch.setattr(reference, "gated", gated)
    monkeypatch.setattr(reference, "gate", lambda *_: calls.append("gate"))
    with fusion.active():
        same = torch.allclose(real(model(ids).logits), plain, atol=1e-5)
    assert calls == ["gated"] and same is not swapped


def test_without_a_compiler_cuda_source_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")  # no library has this version
    monkeypatch.setattr(sys, "path", [])
    cuda_source._compiler.cache_clear()
    try:
        with pytest.raises(Unavailable, match=r"libnvrtc\.so\.0 is not to be found"):
            cuda_source.compiled("", "sm_90a")
    finally:
        cuda_source._compiler.cache_clear()
