"""Packed linear layers: the same function, shared between models that share weights, and gone when the pass is over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.runtime import packed
from outrider.runtime.packed import PackedLinears

pytestmark = pytest.mark.skipif(not packed._supported(), reason="this torch has no oneDNN")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 40, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 33])
def test_packed_layers_compute_the_same_function(rows: int) -> None:
    model, x = network(), torch.randn(2, rows, 48)
    want = model(x)
    linears = PackedLinears(model)
    assert len(linears._forwards) == 2
    with linears.active(), torch.inference_mode():
        assert "forward" in model[0].__dict__
        torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-5)
    assert "forward" not in model[0].__dict__ and torch.equal(model(x), want)


def test_an_error_inside_the_pass_leaves_the_model_as_it_was() -> None:
    model = network()
    with pytest.raises(RuntimeError), PackedLinears(model).active():
        raise RuntimeError
    assert "forward" not in model[0].__dict__


def test_models_that_share_weights_share_packs() -> None:
    model, twin = network(), network()
    twin[0].weight = model[0].weight
    PackedLinears(model)
    before = len(packed._packs)
    PackedLinears(twin)
    assert len(packed._packs) == before + 1  # the second layer only


@pytest.mark.parametrize("eight_bits", [False, True])
def test_weights_that_were_changed_in_place_are_packed_again(eight_bits: bool) -> None:
    model, x = network(), torch.randn(2, 48)
    PackedLinears(model, eight_bits=eight_bits)
    model[2].weight.data.mul_(-3.0)  # as fine-tuning does; no version counter sees it
    want = model(x)
    with PackedLinears(model, eight_bits=eight_bits).active(), torch.inference_mode():
        torch.testing.assert_close(model(x), want, atol=0.03 * float(want.abs().max()), rtol=0.0)


def test_packs_die_with_their_weights() -> None:
    before = len(packed._packs)
    model = network()
    linears = PackedLinears(model)
    assert len(packed._packs) == before + 2
    del model, linears
    assert len(packed._packs) == before


def test_half_precision_and_too_little_memory_are_left_alone(monkeypatch) -> None:
    assert not PackedLinears(network().bfloat16())._forwards
    monkeypatch.setattr(packed, "available", lambda: 1000)
    assert not PackedLinears(network())._forwards


@pytest.mark.skipif(not packed._eight_bits_supported(), reason="this torch has no eight-bit products")
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_eight_bits_stay_near_the_function_and_leave_no_trace(rows: int) -> None:
    model, x = network(), torch.randn(rows, 48)
    want = model(x)
    with PackedLinears(model, eight_bits=True).active(), torch.inference_mode():
        got = model(x)
    assert 0 < float((got - want).abs().max()) < 0.03 * float(want.abs().max())
    assert torch.equal(model(x), want)


@pytest.mark.skipif(not packed._eight_bits_supported(), reason="this torch has no eight-bit products")
def test_activations_have_seven_bits_where_sums_of_eight_would_overflow(monkeypatch) -> None:
    monkeypatch.setattr(packed, "saturates", lambda: True)
    model, x = network(), torch.ones(2, 48)  # all as large as can be: what overflows first
    model[0].weight.data.fill_(0.02)
    want = model(x)
    with PackedLinears(model, eight_bits=True).active(), torch.inference_mode():
        torch.testing.assert_close(model(x), want, atol=0.03 * float(want.abs().max()), rtol=0.0)


@pytest.mark.skipif(not packed._eight_bits_supported(), reason="this torch has no eight-bit products")
def test_whether_sums_overflow_decides_how_activations_are_rounded(monkeypatch) -> None:
    model, x, got = network(), torch.randn(2, 48), []
    for overflow in (False, True):
        monkeypatch.setattr(packed, "saturates", lambda overflow=overflow: overflow)
        with PackedLinears(model, eight_bits=True).active(), torch.inference_mode():
            got.append(model(x))
    assert not torch.equal(*got)


def test_eight_bits_fall_back_to_full_precision_where_torch_has_none(monkeypatch) -> None:
    monkeypatch.setattr(packed, "_eight_bits_supported", lambda: False)
    model, x = network(), torch.randn(2, 48)
    with PackedLinears(model, eight_bits=True).active(), torch.inference_mode():
        torch.testing.assert_close(model(x), network()(x), atol=1e-5, rtol=1e-5)
