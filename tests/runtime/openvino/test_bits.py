"""OpenVINO where every query head has keys of its own: a row alone has the bits of the same row in company."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")

from outrider.runtime.choice import RUNTIMES
from outrider.runtime.openvino.convert import PRECISIONS, compressed, trace
from outrider.runtime.probe import probe
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import openvino_target
from tests.runtime.openvino.test_backend import HAVE_NNCF, small_llama_graphs, widths_that_move_a_bit

LENGTHS = (5, 100, 126, 300)


def llama_of_single_heads() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def made(precision: str) -> SlotTarget:
    model = llama_of_single_heads()
    graph = compressed(trace(model, probe(model)), PRECISIONS[precision])
    return openvino_target(model, graph, precision=precision, max_slots=2, max_context=2048)


@pytest.fixture(scope="module")
def products_keep_bits() -> bool:
    """Whether products add in one order on this processor: so say heads that share keys, which are never one row."""
    model, graphs = small_llama_graphs()
    return openvino_target(model, graphs["float32"], max_slots=1).traits.same_bits


@pytest.mark.parametrize("precision", ["float32", *(["int8"] if HAVE_NNCF else [])])
def test_a_row_alone_has_the_bits_of_company_where_no_heads_share_keys(
    precision: str, products_keep_bits: bool
) -> None:
    if not products_keep_bits:
        pytest.skip("products of this processor add in another order for a single row")
    target = made(precision)
    assert target.traits.same_bits and target.traits.width(1) == 1
    assert {n: moved for n in LENGTHS if (moved := widths_that_move_a_bit(target, n))} == {}


def test_the_doctor_says_whose_rows_have_the_same_bits() -> None:
    assert all("tried at load" in RUNTIMES[name].summary for name in ("openvino", "graphs"))
    assert RUNTIMES["native"].summary.endswith("rows have the same bits in any step")
    assert "same bits" not in RUNTIMES["eager"].summary
