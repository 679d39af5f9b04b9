"""The OpenVINO runtime: the rows of independent forwards, and the same to the last bit whatever shares the step."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")

from outrider.core.records import Needs
from outrider.core.tree import TokenTree, fixed
from outrider.runtime.openvino.backend import OpenVINOBackend
from outrider.runtime.openvino.cache import Layout, RowCache, stride
from outrider.runtime.openvino.convert import PRECISIONS, compressed, trace
from outrider.runtime.probe import probe
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import openvino_target
from tests.runtime import test_architectures as zoo
from tests.runtime.running import run_text, run_trees, shorter_prefixes, together_and_apart

PROMPT = [3, 14, 15, 9, 26, 5, 35]
TREE = fixed(np.array([8, 9, 7, 9, 3, 2, 3, 8]), np.array([-1, 0, 0, 1, 2, 2, 4, 6]))
HAVE_NNCF = importlib.util.find_spec("nncf") is not None


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@cache
def small_llama_graphs() -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """With its graph in every precision. Tracing takes seconds and a target copies what it compiles: made once."""
    model = small_llama()
    graph = trace(model, probe(model))
    known = [p for p in PRECISIONS.values() if HAVE_NNCF or not p.weights]
    forms = {p.form: compressed(graph.clone(), p) for p in known}
    return model, {p.name: forms[p.form] for p in known}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama_graphs()[0]


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    return small_llama_graphs()[1]


@pytest.fixture
def target(model: LlamaForCausalLM, graphs: dict[str, Any]) -> SlotTarget:
    return openvino_target(model, graphs["float32"], max_slots=4, max_rows=16, prompt_rows=5)


def open_slot(target: SlotTarget, prompt: list[int] = PROMPT) -> int:
    slot = target.acquire()
    run_text(target, [slot], [prompt], Needs())
    return slot


def logits(target: SlotTarget, slot: int, tree: TokenTree = TREE) -> torch.Tensor:
    rows = run_trees(target, [slot], [tree], Needs())[0].logits
    assert rows is not None
    return rows


def row_by_row(target: SlotTarget, slot: int, tokens: list[int], alone: bool = False) -> torch.Tensor:
    """The rows of a text, one step each, as plain decoding does; beside padding where a row `alone` has other bits."""
    backend: Any = target.backend
    rows, least = [], backend._least
    backend._least = least if alone or target.traits.same_bits else 2
    for token in tokens:
        backend._steady.forget()  # a single row runs alone, whatever ran before it
        rows.append(logits(target, slot, fixed(np.array([token]), np.array([-1])))[0])
        target.commit([slot], [[]])
    backend._least = least
    return torch.stack(rows)


# Against the model itself

CONVERTED = ("llama", "qwen2", "gpt2", "gemma2", "phi3-window", "opt")


@cache
def zoo_graph(name: str) -> Any:
    return trace(zoo.build(name), probe(zoo.build(name)))


def walk(name: str, **options: Any) -> float:
    def runtime(model: Any, **more: Any) -> SlotTarget:
        return openvino_target(model, zoo_graph(name), **more)

    return zoo.walk(zoo.build(name), runtime=runtime, **options)


@pytest.mark.parametrize("name", CONVERTED)
def test_ragged_batch_of_trees_equals_independent_forwards(name: str) -> None:
    assert walk(name, batch=4, seed=5, steps=8, chunk=13) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, (kind, _) in zoo.ZOO.items() if kind not in ("Falcon",)])
@pytest.mark.parametrize("batch", [1, 5])
def test_every_architecture_that_converts(name: str, batch: int) -> None:
    if "experts" in str(zoo.ZOO[name]):
        pytest.skip("mixtures of experts are refused")
    assert walk(name, batch=batch, seed=7, steps=30, chunk=64, nodes=12) < 1e-4


def test_siblings_seen_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runtime.slots.tree_block", zoo.seeing_siblings)
    assert walk("llama", batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


def test_storage_order_for_depth_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runtime.slots.tree_block", zoo.by_storage_order)
    assert walk("llama", batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


def test_a_stale_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "move", lambda *_: None)
    assert walk("llama", batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


def test_an_ignored_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "_restricted", lambda self, before, tail, *_: (before, tail))
    assert walk("phi3-window", batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


def test_hidden_states_are_transformers_own(model: LlamaForCausalLM, target: SlotTarget) -> None:
    slot = target.acquire()
    chunks = [c for part in run_text(target, [slot], [PROMPT], Needs(logits=True, hidden=(0, 2, -1))) for c in part]
    with torch.no_grad():
        want = model(torch.tensor([PROMPT]), output_hidden_states=True)
    for layer in (0, 2, -1):
        got = torch.cat([c.scores.hidden[layer] for c in chunks])
        assert (got - want.hidden_states[layer][0, :-1]).abs().max() < 1e-4
    got = torch.cat([c.scores.logits for c in chunks])
    assert (got - want.logits[0, :-1]).abs().max() < 1e-4


def test_asking_for_hidden_states_keeps_what_the_slots_hold(target: SlotTarget) -> None:
    slot = open_slot(target)
    before = logits(target, slot)
    scores = run_trees(target, [slot], [TREE], Needs(hidden=(1,)))[0]
    assert scores.hidden[1].shape == (len(TREE), 64)
    assert torch.equal(scores.logits, before)


# Bit by bit

QUANTISED = [name for name in PRECISIONS if name != "float32"]
ALL = ["float32", *(pytest.param(n, marks=pytest.mark.skipif(not HAVE_NNCF, reason="no nncf")) for n in QUANTISED)]


@pytest.mark.parametrize("precision", ALL)
def test_a_tree_scores_every_path_as_plain_decoding_to_the_last_bit(
    model: LlamaForCausalLM, graphs: dict[str, Any], precision: str
) -> None:
    target = openvino_target(model, graphs[precision], precision=precision, max_slots=2, max_rows=16)
    slot = open_slot(target)
    rows = logits(target, slot)
    for leaf in (3, 5, 7):
        twin = target.fork(slot)
        path = [0, *TREE.path(leaf)]
        plain = row_by_row(target, twin, TREE.tokens[path].tolist())
        target.release(twin)
        assert torch.equal(rows[path], plain)


@pytest.mark.parametrize("precision", ALL)
def test_a_row_alone_moves_no_further_than_sums_in_another_order_do(
    model: LlamaForCausalLM, graphs: dict[str, Any], precision: str
) -> None:
    target = openvino_target(model, graphs[precision], precision=precision, max_slots=2, max_rows=16)
    rows = logits(target, slot := open_slot(target))
    path = [0, *TREE.path(7)]
    moved = (row_by_row(target, slot, TREE.tokens[path].tolist(), alone=True) - rows[path]).abs().max()
    assert moved <= (0 if target.traits.same_bits else 1e-5 * rows.abs().max())


LENGTHS = (100, 122, 128, 250, 300, 380, 500, 510, 600, 764, 1000, 1020, 1530)  # of them some in reach of a block's end
TEXT = np.random.default_rng(1).integers(0, 61, 2000).tolist()


def widths_that_move_a_bit(target: SlotTarget, length: int, tokens: int = 12) -> list[int]:
    """The same text behind `length` tokens in steps of 1, 5 and 12, and as the spine of a tree: who differs from 1."""
    slot, text = open_slot(target, TEXT[:length]), TEXT[length - 1 : length - 1 + tokens]
    plain = row_by_row(target, twin := target.fork(slot), text)
    target.release(twin)
    moved = []
    for width in (5, tokens):
        twin, rows = target.fork(slot), []
        for at in range(0, tokens, width):
            part = text[at : at + width]
            rows.append(logits(target, twin, fixed(np.array(part), np.arange(len(part)) - 1)))
            target.commit([twin], [list(range(1, len(part)))])
        target.release(twin)
        moved += [width] * (not torch.equal(torch.cat(rows), plain))
    spine = np.arange(tokens) * 2  # every node has a sibling before it
    nodes, parents = np.full(2 * tokens - 1, 7), np.repeat(spine, 2)[: 2 * tokens - 1] - 2
    nodes[spine], parents[0] = text, -1
    parents[1:] = np.maximum(parents[1:], 0)
    parents[1::2] = spine[:-1]
    rows = logits(target, slot, fixed(nodes, parents))[spine]
    target.release(slot)
    return moved + [0] * (not torch.equal(rows, plain))


@pytest.mark.parametrize("precision", ALL)
def test_no_prefix_is_too_long_for_the_same_bits(
    model: LlamaForCausalLM, graphs: dict[str, Any], precision: str
) -> None:
    target = openvino_target(model, graphs[precision], precision=precision, max_slots=2, max_context=2048)
    assert {n: moved for n in LENGTHS if (moved := widths_that_move_a_bit(target, n))} == {}


def test_rows_counted_outside_the_block_of_their_position_show_in_the_last_bit(
    model: LlamaForCausalLM, graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class InTheLast(Layout):
        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            for mask in self.tail_masks:
                seen = mask.max(1, keepdims=True)
                mask[:] = -np.inf
                mask[:, -1:] = seen

    target = openvino_target(model, graphs["float32"], max_slots=2, max_context=2048)
    monkeypatch.setattr("outrider.runtime.openvino.backend.Layout", InTheLast)
    assert any(widths_that_move_a_bit(target, n) for n in LENGTHS)


@pytest.mark.parametrize("precision", ALL)
def test_prompts_leave_the_same_bits_in_pieces_of_any_size(
    model: LlamaForCausalLM, graphs: dict[str, Any], precision: str
) -> None:
    rows = []
    for chunk in (512, 100, 7):
        target = openvino_target(model, graphs[precision], precision=precision, max_slots=1, prompt_rows=chunk)
        rows.append(logits(target, open_slot(target, TEXT[:400])))
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("precision", ALL)
def test_batch_one_equals_batch_n_to_the_last_bit(
    model: LlamaForCausalLM, graphs: dict[str, Any], precision: str
) -> None:
    target = openvino_target(model, graphs[precision], precision=precision, max_slots=3, max_rows=16)
    prompts = [PROMPT, [5, 4, 3], list(range(40))]
    slots = [open_slot(target, prompt) for prompt in prompts]
    small = fixed(np.array([1, 2]), np.array([-1, 0]))
    together = run_trees(target, slots, [TREE, small, TREE], Needs())
    alone = [logits(target, s, t) for s, t in zip(slots, [TREE, small, TREE], strict=True)]
    for rows, single in zip(together, alone, strict=True):
        assert rows.logits is not None and torch.equal(rows.logits, single)


def test_a_grown_capacity_changes_no_bit(model: LlamaForCausalLM, graphs: dict[str, Any]) -> None:
    target = openvino_target(model, graphs["float32"], max_slots=2, max_rows=16)
    slot = open_slot(target)
    before = logits(target, slot)
    open_slot(target, TEXT[:600])
    assert target.backend.cache.capacity > stride(0)
    assert torch.equal(logits(target, slot), before)


class Strange(OpenVINOBackend):
    """Steps of fewer than `several` rows come out different by this `factor`."""

    several, factor = 2, 1.01

    def _infer(self, first: int, blocks: Any, logits: bool) -> Any:
        request = super()._infer(first, blocks, logits)
        several = max(self._least, max(b.rows for b in blocks)) >= self.several

        def out(name: str) -> Any:
            return request.out(name) * np.float32(1 if several or name != "logits" else self.factor)

        return SimpleNamespace(out=out)


def strange(model: Any, graph: Any, precision: str = "float32") -> Strange:
    backend = Strange(model, graph, precision=precision)
    SlotTarget(backend, max_slots=1)
    return backend


def test_a_kernel_of_its_own_for_single_rows_is_noticed_at_load(
    model: LlamaForCausalLM, graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert strange(model, graphs["float32"]).width(1) == 2
    monkeypatch.setattr(Strange, "several", 3)
    assert strange(model, graphs["float32"]).width(1) == 2 and caplog.text == ""
    monkeypatch.setattr("outrider.runtime.openvino.backend.saturates", lambda: False)
    if HAVE_NNCF:
        target = SlotTarget(Strange(model, graphs["int8"], precision="int8"), max_slots=1)
        assert "a text may part from plain decoding" in caplog.text
        assert target.free_slots == 1 and target.cache_bytes == 0


@pytest.mark.parametrize(("precision", "int8_products", "least"), [
    ("float32", True, 1), ("int8-weights", True, 1), ("int8", False, 1), ("int8", True, 2),
])  # fmt: skip
def test_another_last_bit_keeps_rows_together_only_where_activations_are_rounded(
    model: LlamaForCausalLM, graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, precision: str,
    int8_products: bool, least: int,
) -> None:  # fmt: skip
    if precision not in graphs:
        pytest.skip("no nncf")
    monkeypatch.setattr("outrider.runtime.openvino.backend.saturates", lambda: not int8_products)
    monkeypatch.setattr(Strange, "factor", 1 + 1e-6)
    traits = strange(model, graphs[precision], precision).traits
    assert traits.width is not None and traits.width(1) == least and traits.same_bits == (least == 2)


# Slots


def test_growing_a_tree_level_by_level_equals_one_verify(target: SlotTarget) -> None:
    slot = open_slot(target)
    whole = logits(target, slot)
    first = run_trees(target, [slot], [fixed(TREE.tokens[:3], TREE.parents[:3])], Needs())[0].logits
    rest = run_trees(target, [slot], [TREE], Needs(), done=[3])[0].logits
    assert torch.equal(torch.cat([first, rest]), whole)


def test_accepted_rows_stay_and_rejected_ones_leave_no_trace(target: SlotTarget) -> None:
    slot, other = open_slot(target), open_slot(target)
    logits(target, slot)
    target.commit([slot], [TREE.path(7)])
    path = [0, *TREE.path(7)]
    plain = row_by_row(target, other, TREE.tokens[path].tolist())
    assert target.length(slot) == target.length(other) == len(PROMPT) - 1 + len(path)
    assert torch.equal(logits(target, slot), logits(target, other))
    assert plain.shape[0] == len(path)


def test_forks_go_their_own_ways_and_released_rows_are_filled(target: SlotTarget) -> None:
    first, second = open_slot(target), open_slot(target, [1, 2, 3, 4])
    want = logits(target, second)
    third = target.fork(second)
    row_by_row(target, third, [7, 7])
    target.release(first)  # its row is taken by the last one
    assert torch.equal(logits(target, second), want)
    again = open_slot(target, [1, 2, 3, 4, 7, 7])
    row_by_row(target, third, [4])
    assert target.length(third) == 6 and target.free_slots == 1
    scattered = run_trees(target, [again, second], [TREE, TREE], Needs())  # rows that are no neighbours
    assert torch.equal(scattered[1].logits, want)


@pytest.mark.parametrize("length", [1, 100, 128, 200, 256, 280])
def test_a_shorter_prefix_is_as_if_there_had_been_no_more(target: SlotTarget, length: int) -> None:
    for want, got in shorter_prefixes(target, TEXT[:300], length):
        assert (want.logits - got.logits).abs().max() < 1e-5


def test_text_and_trees_together_equal_separate_passes(target: SlotTarget) -> None:
    for one, two in together_and_apart(target, PROMPT, TREE, TEXT[:5]):
        assert (one.logits - two.logits).abs().max() < 1e-5


def test_capacity_falls_back_when_nobody_is_left(target: SlotTarget) -> None:
    slot = open_slot(target, TEXT[:600])
    large = target.cache_bytes
    target.release(slot)
    assert target.cache_bytes == 0 < large
    assert logits(target, open_slot(target)).isfinite().all()
    assert 0 < target.cache_bytes < large
