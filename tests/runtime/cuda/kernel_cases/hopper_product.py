"""Products of many rows on Hopper against float64, what the kernel does not take, and where it does not compile."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from outrider.runtime.cuda import hopper_product
from outrider.runtime.cuda import projection as graphed_projection
from outrider.runtime.cuda import source as cuda_source
from outrider.runtime.cuda.hopper_product import PAIR, PARTS, ProductTiling, gated, parts
from outrider.runtime.cuda.launch import hopper
from outrider.runtime.cuda.source import Unavailable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_hopper = pytest.mark.skipif(not hopper(DEVICE), reason="needs a Hopper GPU")
kinds = pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])


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
@kinds
@pytest.mark.parametrize(
    ("rows", "width", "inputs"),
    [(65, 112, 64), (100, 1000, 512), (128, 4096, 1024), (129, 224, 128), (200, 1536, 576), (256, 14336, 4096)],
)
def test_silu_of_one_product_times_the_other(rows: int, width: int, inputs: int, kind: torch.dtype) -> None:
    x, first, second = given(rows, width, inputs, kind)
    got = gated(x, first, second)
    assert close(got, x, first, second)
    assert not close(got, x, second, first)
    assert not close(got, x.roll(1, 0), first, second)


@needs_hopper
@kinds
@pytest.mark.parametrize(
    ("rows", "width", "inputs", "count"),
    [(129, 72, 8192, 2), (200, 1000, 16384, 4), (256, 4096, 14336, 2), (100, 1000, 32768, 8), (65, 4096, 16384, 4)],
)
def test_parts_add_up_to_the_product(rows: int, width: int, inputs: int, count: int, kind: torch.dtype) -> None:
    x, weight, _ = given(rows, width, inputs, kind)
    want = linear(x.double(), weight.double())
    out = torch.full((count, rows, width), torch.nan, device=DEVICE)
    got = hopper_product._launch(PARTS[1 if rows <= 128 else 2], x, weight, weight, out, count)
    assert got is not None
    assert (got.double().sum(0) - want).abs().max() < 1e-4
    first = linear(x[:, : inputs // count].double(), weight[:, : inputs // count].double())
    assert (got[0].double() - first).abs().max() < 1e-4
    assert not (got.double().sum(0).roll(1, 0) - want).abs().max() < 1e-4


@needs_hopper
def test_a_row_is_the_same_wherever_it_stands_and_a_recording_reads_new_rows() -> None:
    x, first, second = given(256, 448, 16384)
    for made in (lambda: gated(x, first, second), lambda: parts(x, first)):
        alone = made()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = made()
        x.copy_(x.roll(100, 0).clone())
        graph.replay()
        assert alone is not None and out is not None and torch.equal(out, alone.roll(100, -2))
        assert not torch.equal(out, alone)


@needs_hopper
def test_what_the_copy_engine_or_the_tiles_cannot_do_is_refused() -> None:
    x, first, second = given(80, 112, 128)
    assert gated(x[:64], first, second) is None  # few rows have another kernel
    assert gated(x.repeat(4, 1), first, second) is None
    assert gated(x.float(), first.float(), second.float()) is None
    assert gated(x[:, :96].contiguous(), first[:, :96].contiguous(), second[:, :96].contiguous()) is None
    assert gated(x[:, :64], first[:, :64], second[:, :64]) is None  # with gaps between the rows
    assert gated(x, first[:108], second[:108]) is None
    assert gated(x, first[:56], second) is None


def test_products_go_in_parts_only_where_there_are_processors_and_inputs_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(hopper_product, "hopper", lambda _: True)
    monkeypatch.setattr(hopper_product, "processors", lambda _: 132)
    monkeypatch.setattr(hopper_product, "_launch", lambda *given: counts.append(given[-1]) or given[-2])

    def left(rows: int, width: int, inputs: int) -> Tensor | None:
        x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16, device="meta") for n in (rows, width))
        return graphed_projection.parts(x, weight)

    found = left(256, 4096, 14336)
    assert found is not None and found.shape == (2, 256, 4096) and found.dtype == torch.float32
    assert left(129, 2048, 16384) is not None and left(65, 4096, 14336) is not None and counts == [2, 4, 2]
    assert left(256, 448, 16384) is not None and counts.pop() == 4  # more parts would be too short
    assert left(80, 4096, 4096) is not None and counts.pop() == 2
    assert left(80, 4096, 2048) is None and left(256, 4096, 4096) is None  # parts too short
    assert left(256, 16384, 16384) is None  # tiles enough
    assert left(256, 4096, 4096 + 64 * 65) is None  # an odd number of slices
    assert left(257, 4096, 14336) is None and counts == [2, 4, 2]


@needs_hopper
def test_where_it_does_not_compile_there_is_one_line_and_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper_product._function.cache_clear()
    monkeypatch.setattr(hopper_product, "source", lambda *_: "this is no CUDA")
    try:
        with caplog.at_level(logging.WARNING):
            assert gated(*given(80, 112, 128)) is None and gated(*given(80, 112, 128)) is None
    finally:
        hopper_product._function.cache_clear()
    assert len(caplog.records) == 1 and "vendor's library" in caplog.text


def test_off_hopper_nothing_is_taken() -> None:
    if hopper(DEVICE):
        pytest.skip("this is one")
    assert gated(*given(128, 112, 128)) is None and parts(*given(256, 128, 8192)[:2]) is None


@kinds
@pytest.mark.parametrize(("tiling", "cluster"), [(PAIR, 1), (PAIR, 2), (PARTS[1], 1), (PARTS[2], 2)])
def test_the_source_compiles_for_hopper_wherever_the_compiler_is(
    kind: torch.dtype, tiling: ProductTiling, cluster: int
) -> None:
    try:
        cuda_source._compiler()
    except Unavailable as error:
        pytest.skip(str(error))
    assert cuda_source.compiled(hopper_product.source(kind, tiling, cluster), "sm_90a")
    with pytest.raises(Unavailable, match="does not compile"):
        cuda_source.compiled("nonsense", "sm_90a")
