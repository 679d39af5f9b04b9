"""Projection and small kernels against plain torch; `test_kernels.py` runs this file in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from outrider.runtime.cuda import kernels as small
from outrider.runtime.cuda.launch import hopper
from outrider.runtime.cuda.projection import ProjectionTiling, parts, project, streams
from outrider.runtime.cuda.reference import Norm

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
if hopper(DEVICE):
    from outrider.runtime.cuda import hopper_projection as wide
DTYPE, CLOSE = (torch.bfloat16, 1e-2) if GPU else (torch.float16, 2e-3)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def plain(
    x: torch.Tensor, weights: list[torch.Tensor], biases: Any, norm: Norm | None, residual: Any, gated: bool
) -> torch.Tensor:
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    parts = [F.linear(x, w.double(), None if b is None else b.double()) for w, b in zip(weights, biases, strict=True)]
    out = F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)
    return out if residual is None else out + residual.double()


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(
    st.integers(0, 2**31), st.sampled_from([1, 3, 16, 20, 64]), st.sampled_from([64, 192, 512]),
    st.sampled_from([(48,), (64, 64, 64), (128, 64, 64), (100, 30), (130,)]), st.booleans(), st.booleans(),
    st.booleans(), st.sampled_from([None, 1, 2, 4]),
)  # fmt: skip
def test_a_product_with_all_that_stands_around_it(
    seed: int, rows: int, inputs: int, widths: Any, normed: bool, bias: bool, residual: bool, split: int | None
) -> None:
    torch.manual_seed(seed)
    x = normal(rows, inputs)
    weights = [normal(n, inputs) / inputs**0.5 for n in widths]
    biases = [normal(n) if bias else None for n in widths]
    norm = Norm(normal(inputs), 1e-3) if normed else None
    added = normal(rows, sum(widths)) if residual else None
    tiling = None if split is None or (inputs // 64) % split else ProjectionTiling(64, 64, split, 2)
    assert streams(x, weights)
    for _ in range(2):  # the second finds the counters as the first left them
        got = project(x, weights, biases=biases, norm=norm, residual=added, tiling=tiling)
        assert error(got, plain(x, weights, biases, norm, added, False)) < CLOSE


@pytest.mark.parametrize("split", [None, 1, 2])
@pytest.mark.parametrize("rows", [1, 33])
def test_a_gated_pair(rows: int, split: int | None) -> None:
    x, weights, norm = normal(1, rows, 256), [normal(150, 256) / 16 for _ in range(2)], Norm(normal(256), 1e-6)
    got = project(x, weights, norm=norm, gated=True, tiling=split and ProjectionTiling(64, 64, split, 2))
    assert got.shape == (1, rows, 150)
    assert error(got, plain(x, weights, (None, None), norm, None, True)) < CLOSE


@pytest.mark.skipif(not GPU, reason="the interpreter multiplies by numpy, whose order of additions follows the shape")
def test_a_row_gives_the_same_bits_beside_any_others() -> None:
    x, weights = normal(64, 512), [normal(128, 512)]
    whole = project(x, weights, tiling=ProjectionTiling(64, 64, 2, 2))
    for rows in (1, 5, 32):
        assert torch.equal(project(x[:rows], weights, tiling=ProjectionTiling(64, 64, 2, 2)), whole[:rows])


@pytest.mark.parametrize("bug", ["norm", "weight", "residual"])
def test_a_planted_bug_is_caught(bug: str) -> None:
    x, weights, added = normal(4, 128), [normal(64, 128), normal(64, 128)], normal(4, 128)
    norm = Norm(normal(128), 1e-6)
    want = plain(x, weights, (None, None), norm, added, False)
    if bug == "norm":
        norm = Norm(norm.weight, 1.0)
    elif bug == "weight":
        weights = weights[::-1]
    else:
        added = added.roll(1, 0)
    assert error(project(x, weights, norm=norm, residual=added), want) > 5 * CLOSE


@pytest.mark.parametrize("count", [1, 3])
def test_a_sum_of_parts_is_rounded_once(count: int) -> None:
    x, left, weight = normal(5, 80), normal(count, 5, 80, dtype=torch.float32), normal(80)
    whole, normed = small.add_norm(x, left, weight, 1e-5)
    assert torch.equal(whole, x + sum(left).to(DTYPE))  # type: ignore[union-attr]
    assert error(normed, F.rms_norm(whole.double(), (80,), weight.double(), 1e-5)) < CLOSE


on_hopper = pytest.mark.skipif(not hopper(DEVICE), reason="needs a GPU of Hopper's generation")


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [128, 640, 4096])
@pytest.mark.parametrize("widths", [(72, 72), (4096, 1024, 1024), (10000,)])
def test_wide_products_stream_through_shared_memory(widths: Any, inputs: int, gated: bool) -> None:
    if gated and len(widths) != 2:
        widths = (widths[0], widths[0])
    weights = [normal(n, inputs) / inputs**0.5 for n in widths]
    for rows in (2, 5, 16, 17, 40, 64):
        x, norm = normal(2, rows, 2 * inputs)[1:, :, :inputs], Norm(normal(inputs), 1e-3)
        assert wide.fits(x, weights, False)
        want = plain(x, weights, [None] * len(widths), norm, None, gated)
        got = project(x, weights, norm=norm, gated=gated)
        assert error(got, want) < CLOSE
        for _ in range(10):  # a race would move bits
            assert torch.equal(project(x, weights, norm=norm, gated=gated), got)


@on_hopper
@pytest.mark.parametrize("rows", [2, 16, 64])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (576, 1536), (20000, 256)])
def test_the_norm_adds_up_what_a_wide_product_leaves(shape: tuple[int, int], rows: int) -> None:
    outputs, inputs = shape
    x, weight, residual = normal(1, rows, inputs), normal(outputs, inputs) / inputs**0.5, normal(1, rows, outputs)
    norm = normal(outputs)
    left = parts(x, weight)
    assert left is not None and left.dtype == torch.float32
    assert error(left.sum(0), x.double() @ weight.double().T) < CLOSE
    whole, normed = small.add_norm(residual, left, norm, 1e-5)
    assert error(whole, residual.double() + x.double() @ weight.double().T) < CLOSE
    assert error(normed, F.rms_norm(whole.double(), (outputs,), norm.double(), 1e-5)) < CLOSE
    for _ in range(10):
        assert torch.equal(parts(x, weight), left)  # type: ignore[arg-type]


@on_hopper
def test_what_the_wide_kernel_does_not_take() -> None:
    weight = normal(64, 256)
    assert wide.fits(normal(40, 256), [weight], False)
    assert not wide.fits(normal(40, 256), [weight], True)
    assert not wide.fits(normal(1, 256), [weight], False) and not wide.fits(normal(65, 256), [weight], False)
    assert not wide.fits(normal(40, 192), [normal(64, 192)], False)
    assert not wide.fits(normal(40, 257)[:, 1:], [weight], False)


def test_what_the_kernel_does_not_take() -> None:
    weight = normal(64, 128)
    assert not streams(normal(65, 128), [weight])
    assert not streams(normal(1, 128).float(), [weight])
    assert not streams(normal(1, 128), [normal(128, 64).T])
    assert not streams(normal(1, 96), [normal(64, 96)])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.double().chunk(2, -1)
    return x.double() * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@pytest.mark.parametrize("rotary", [False, True])
def test_rows_are_stored_where_they_belong(rotary: bool) -> None:
    key, value = (normal(1, 6, 4, 24, dtype=torch.float32).transpose(1, 2) for _ in range(2))  # [1, 4, 6, 24]
    keys, values = torch.zeros(5, 4, 30, 24, device=DEVICE), torch.zeros(5, 4, 30, 24, device=DEVICE)
    slots = torch.tensor([4, 4, 4, 1, 1, 1], device=DEVICE)
    places = torch.tensor([7, 8, 29, 0, 2, 1], device=DEVICE)
    angle = torch.rand(1, 6, 12, device=DEVICE).repeat(1, 1, 2)
    turn = (angle.cos(), angle.sin()) if rotary else None
    small.store_rows(key, value, keys, values, slots, places, turn)
    want = turned(key, *turn) if turn else key
    for row, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
        assert torch.allclose(keys[slot, :, place].double(), want[0, :, row].double(), atol=1e-6)
        assert torch.equal(values[slot, :, place], value[0, :, row])
    assert int((keys.abs().sum(-1) > 0).sum()) == 6 * 4  # nothing else was written


def test_an_accepted_path_moves_in_all_layers_at_once() -> None:
    block = normal(3, 4, 2, 40, 16, dtype=torch.float32)
    want = block.clone()
    slots = torch.tensor([2, 0], device=DEVICE)
    sources = torch.full((2, 8), -1, device=DEVICE)
    targets = sources.clone()
    sources[0, :3], targets[0, :3] = torch.tensor([12, 13, 17]), torch.tensor([11, 12, 13])  # overlapping
    for s, t in ((12, 11), (13, 12), (17, 13)):
        want[:, 2, :, t] = block[:, 2, :, s]
    small.move_rows(block, slots, sources, targets)
    assert torch.equal(block, want)


def test_norm_and_gate() -> None:
    x, weight = normal(5, 3, 72, dtype=torch.float32).transpose(0, 1), normal(72, dtype=torch.float32)
    want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert error(small.rms_norm(x, weight, 1e-5), want) < 1e-6
    y = normal(3, 5, 72, dtype=torch.float32)
    whole, normed = small.add_norm(x, y, weight, 1e-5)
    assert torch.equal(whole, x + y) and error(normed, small.rms_norm(x + y, weight, 1e-5)) < 1e-6
    a, b = normal(7, 100, dtype=torch.float32), normal(7, 100, dtype=torch.float32)
    assert error(small.gate(a, b), F.silu(a) * b) < 1e-6


@pytest.mark.parametrize("size", [5, small.STRETCH, 2 * small.STRETCH + 77])
def test_the_likeliest_is_the_first_of_the_largest(size: int) -> None:
    logits = torch.randint(-9, 9, (3, 7, size), device=DEVICE).to(DTYPE)  # ties everywhere
    logits[0, 0], logits[1, 1] = -torch.inf, -3.0
    for _ in range(2):  # the second finds the counters as the first left them
        got = small.likeliest(logits)
        assert torch.equal(got, (logits == logits.amax(-1, keepdim=True)).float().argmax(-1).int())
