"""Gated pairs of many rows on Hopper against float64, what the kernel does not take, and where it does not compile."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from outrider.target import cuda_source, hopper_gated
from outrider.target.cuda_source import Unavailable
from outrider.target.graphed_launch import hopper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(not hopper(DEVICE), reason="needs a Hopper GPU")


def given(rows: int, width: int, inputs: int, kind: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + width)
    weights = (0.5 * torch.randn(2, width, inputs, device=DEVICE) / inputs**0.5).to(kind)
    return torch.randn(rows, inputs, device=DEVICE).to(kind), weights[0], weights[1]


def close(got: Tensor | None, x: Tensor, first: Tensor, second: Tensor) -> bool:
    """Within what rounding both products, SiLU and the result may bring."""
    assert got is not None
    want = silu(linear(x.double(), first.double())) * linear(x.double(), second.double())
    step = torch.finfo(x.dtype).eps
    return bool(((got.double() - want).abs() <= 4 * step * want.abs() + step * 1e-2).all())


@needs_hopper
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "inputs"),
    [(65, 112, 64), (100, 1000, 512), (128, 4096, 1024), (129, 224, 128), (200, 1536, 576), (256, 14336, 4096)],
)
def test_silu_of_one_product_times_the_other(rows: int, width: int, inputs: int, kind: torch.dtype) -> None:
    x, first, second = given(rows, width, inputs, kind)
    got = hopper_gated.gated(x, first, second)
    assert close(got, x, first, second)
    assert not close(got, x, second, first)
    assert not close(got, x.roll(1, 0), first, second)


@needs_hopper
def test_a_row_is_the_same_wherever_it_stands_and_a_recording_reads_new_rows() -> None:
    x, first, second = given(256, 448, 256)
    alone = hopper_gated.gated(x, first, second)
    turned = hopper_gated.gated(x.roll(100, 0), first, second)
    assert alone is not None and turned is not None and torch.equal(alone.roll(100, 0), turned)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hopper_gated.gated(x, first, second)
    x.copy_(x.roll(100, 0).clone())
    graph.replay()
    assert out is not None and torch.equal(out, turned)


@needs_hopper
def test_what_the_copy_engine_or_the_tiles_cannot_do_is_refused() -> None:
    x, first, second = given(80, 112, 128)
    assert hopper_gated.gated(x[:64], first, second) is None  # few rows have another kernel
    assert hopper_gated.gated(x.repeat(4, 1), first, second) is None
    assert hopper_gated.gated(x.float(), first.float(), second.float()) is None
    assert hopper_gated.gated(x[:, :96].contiguous(), first[:, :96].contiguous(), second[:, :96].contiguous()) is None
    assert hopper_gated.gated(x[:, :64], first[:, :64], second[:, :64]) is None  # with gaps between the rows
    assert hopper_gated.gated(x, first[:108], second[:108]) is None
    assert hopper_gated.gated(x, first[:56], second) is None


@needs_hopper
def test_where_it_does_not_compile_there_is_one_line_and_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper_gated._function.cache_clear()
    monkeypatch.setattr(hopper_gated, "source", lambda *_: "this is no CUDA")
    try:
        with caplog.at_level(logging.WARNING):
            assert hopper_gated.gated(*given(80, 112, 128)) is None and hopper_gated.gated(*given(80, 112, 128)) is None
    finally:
        hopper_gated._function.cache_clear()
    assert len(caplog.records) == 1 and "vendor's library" in caplog.text


def test_off_hopper_nothing_is_taken() -> None:
    if hopper(DEVICE):
        pytest.skip("this is one")
    assert hopper_gated.gated(*given(128, 112, 128)) is None


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_source_compiles_for_hopper_wherever_the_compiler_is(kind: torch.dtype, cluster: int) -> None:
    try:
        cuda_source._compiler()
    except Unavailable as error:
        pytest.skip(str(error))
    assert cuda_source.compiled(hopper_gated.source(kind, cluster), "sm_90a")
    with pytest.raises(Unavailable, match="does not compile"):
        cuda_source.compiled("nonsense", "sm_90a")
