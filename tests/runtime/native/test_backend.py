"""The native runtime: the rows of independent forwards, and the same to the last bit whatever shares the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.errors import InputError, UnsupportedModel
from outrider.core.records import Needs, Piece
from outrider.core.tree import TokenTree, fixed, root
from outrider.runtime.choice import RUNTIMES, build
from outrider.runtime.native import backend as native
from outrider.runtime.native.cache import NativeCache
from outrider.runtime.native.kernels.products import Linear
from outrider.runtime.native.model import BITS, as_held
from outrider.runtime.slots import SlotTarget
from outrider.runtime.targets import native_target
from tests.runtime import test_architectures as zoo
from tests.runtime.running import run_text, run_trees, shorter_prefixes, together_and_apart
from tests.runtime.test_steps import level_by_level_equals_one_verify, small

PROMPT = [3, 14, 15, 9, 26, 5, 35]
TREE = fixed(np.array([8, 9, 7, 9, 3, 2, 3, 8]), np.array([-1, 0, 0, 1, 2, 2, 4, 6]))
TEXT = np.random.default_rng(1).integers(0, 61, 400).tolist()
RUN = ("llama", "llama-dynamic-rope", "qwen2", "qwen2-window", "qwen3", "mistral-window")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=72, intermediate_size=100, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=68, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=BITS)
def target(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> SlotTarget:
    """One for all tests: they release what they acquire."""
    return native_target(model, precision=request.param, max_slots=4, max_rows=32)


def open_slot(target: SlotTarget, prompt: list[int] = PROMPT) -> int:
    slot = target.acquire()
    run_text(target, [slot], [prompt], Needs())
    return slot


def logits(target: SlotTarget, slot: int, tree: TokenTree = TREE) -> torch.Tensor:
    rows = run_trees(target, [slot], [tree], Needs())[0].logits
    assert rows is not None
    return rows


def row_by_row(target: SlotTarget, slot: int, tokens: list[int]) -> torch.Tensor:
    """The rows of a text as plain decoding scores them, on a fork."""
    twin, rows = target.fork(slot), []
    for token in tokens:
        rows.append(logits(target, twin, root(token))[0])
        target.commit([twin], [[]])
    target.release(twin)
    return torch.stack(rows)


# Against the model itself


def walk(name: str, **options: Any) -> float:
    return zoo.walk(zoo.build(name), runtime=native_target, **options)


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("batch", [1, 4])
def test_trees_equal_independent_forwards(name: str, batch: int) -> None:
    assert walk(name, batch=batch, seed=5, steps=8, chunk=13) < 1e-4


@pytest.mark.parametrize("bug", [zoo.seeing_siblings, zoo.by_storage_order])
def test_wrong_rows_are_caught(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "self_check", lambda *_: None)
    monkeypatch.setattr("outrider.runtime.slots.tree_block", bug)
    assert walk("llama", batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


def test_a_stale_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeCache, "move", lambda *_: None)
    assert walk("llama", batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


@pytest.mark.parametrize("name", [n for n in RUN if n in zoo.WINDOWED])
def test_an_ignored_window_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = native.weights_of
    monkeypatch.setattr(native, "self_check", lambda *_: None)
    monkeypatch.setattr(native, "weights_of", lambda *of: (w := made(*of))._replace(windows=w.windows * 0))
    assert walk(name, batch=2, seed=3, steps=3, chunk=16, enough=zoo.CAUGHT) > zoo.CAUGHT


def test_rounded_weights_are_the_model_with_these_weights(model: LlamaForCausalLM, target: SlotTarget) -> None:
    """Only activations of int8 and int4 are rounded besides."""
    slot, text = open_slot(target), [*PROMPT[:-1], *TREE.tokens[[0, *TREE.path(7)]].tolist()]
    got = logits(target, slot)[[0, *TREE.path(7)]]
    with torch.no_grad():
        plain = model(torch.tensor([text])).logits[0, len(PROMPT) - 1 :]
        with as_held(model, target.backend._weights):
            held = model(torch.tensor([text])).logits[0, len(PROMPT) - 1 :]
        assert torch.equal(model(torch.tensor([text])).logits[0, len(PROMPT) - 1 :], plain)
    target.release(slot)
    near, far = (got - held).abs().max() / held.abs().max(), (plain - held).abs().max() / held.abs().max()
    exact = target.traits.precision == "float32"
    assert near < (1e-5 if exact else 2e-3)
    assert far < 1e-6 if exact else 30 * near < far < (0.3 if target.traits.precision == "int8" else 1.5)


def test_hidden_states_are_transformers_own(model: LlamaForCausalLM) -> None:
    target = native_target(model, max_slots=1, prompt_rows=4)
    slot, needs = target.acquire(), Needs(logits=True, hidden=(0, 2, -1))
    chunks = [c for part in run_text(target, [slot], [PROMPT], needs) for c in part]
    scores = run_trees(target, [slot], [TREE], needs)[0]
    path = [0, *TREE.path(7)]
    with torch.no_grad():
        text = [*PROMPT[:-1], *TREE.tokens[path].tolist()]
        want = model(torch.tensor([text]), output_hidden_states=True)
    for layer in needs.hidden:
        got = torch.cat([*(c.scores.hidden[layer] for c in chunks), scores.hidden[layer][path]])
        assert (got - want.hidden_states[layer][0]).abs().max() < 1e-5 * got.abs().max()
    got = torch.cat([*(c.scores.logits for c in chunks), scores.logits[path]])
    assert (got - want.logits[0]).abs().max() < 1e-5 * got.abs().max()


# Bit by bit


@pytest.mark.parametrize("length", [1, 7, 62, 64, 130, 300])
def test_a_tree_scores_every_path_as_plain_decoding_to_the_last_bit(target: SlotTarget, length: int) -> None:
    slot = open_slot(target, TEXT[:length])
    rows = logits(target, slot)
    for leaf in (3, 5, 7):
        path = [0, *TREE.path(leaf)]
        assert torch.equal(rows[path], row_by_row(target, slot, TREE.tokens[path].tolist()))
    target.release(slot)


@pytest.mark.parametrize("width", [3, 5, 24])
def test_steps_of_any_width_have_the_bits_of_single_rows(target: SlotTarget, width: int) -> None:
    slot, text = open_slot(target, TEXT[:60]), TEXT[60:84]
    plain, rows = row_by_row(target, slot, text), []
    for at in range(0, len(text), width):
        part = text[at : at + width]
        rows.append(logits(target, slot, fixed(np.array(part), np.arange(len(part)) - 1)))
        target.commit([slot], [list(range(1, len(part)))])
    target.release(slot)
    assert torch.equal(torch.cat(rows), plain)


def test_prompts_leave_the_same_bits_in_pieces_of_any_size(target: SlotTarget) -> None:
    rows = []
    for width in (64, 33, 7):
        slot = target.acquire()
        for at in range(0, 199, width):
            target.run([Piece(slot, TEXT[at : min(at + width, 199)])], Needs())
        rows.append(logits(target, slot, fixed(np.array([TEXT[199], *TREE.tokens[1:]]), TREE.parents)))
        target.release(slot)
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


def test_batch_one_equals_batch_n_to_the_last_bit(target: SlotTarget) -> None:
    prompts, small = [PROMPT, [5, 4, 3], TEXT[:140]], fixed(np.array([1, 2]), np.array([-1, 0]))
    slots = [target.acquire() for _ in prompts]
    run_text(target, slots, prompts, Needs())
    together = run_trees(target, slots, [TREE, small, TREE], Needs())
    for slot, prompt, tree, rows in zip(slots, prompts, [TREE, small, TREE], together, strict=True):
        single = open_slot(target, prompt)
        assert torch.equal(rows.logits, logits(target, slot, tree)) and torch.equal(
            rows.logits, logits(target, single, tree)
        )
        target.release(single)
    for slot in slots:
        target.release(slot)


@pytest.mark.parametrize("rounded", [False, True])
def test_text_in_the_same_pass_changes_no_bit_of_a_tree(target: SlotTarget, rounded: bool) -> None:
    for one, two in together_and_apart(target, PROMPT, TREE, TEXT[:40]):
        assert torch.equal(one.logits, two.logits)
    slots, needs = [target.acquire(), open_slot(target)], Needs(rounded=rounded)
    scores = target.run([Piece(slots[0], TEXT[:40]), Piece(slots[1], tree=TREE)], needs)
    assert scores[0].logits is None and scores[0].likeliest is None
    assert scores[1].logits.argmax(1).tolist() == logits(target, slots[1]).argmax(1).tolist()
    for slot in slots:
        target.release(slot)


@pytest.mark.parametrize("length", [1, 64, 100, 256, 300])
def test_a_shorter_prefix_is_as_if_there_had_been_no_more(target: SlotTarget, length: int) -> None:
    for want, got in shorter_prefixes(target, TEXT[:310], length):
        assert torch.equal(want.logits, got.logits)


def test_threads_change_no_bit(model: LlamaForCausalLM, target: SlotTarget) -> None:
    torch.set_num_threads(3)
    try:
        other = native_target(model, precision=target.traits.precision, max_slots=1, max_rows=32)
    finally:
        torch.set_num_threads(1)
    assert other.backend._team.threads == 3
    for tree in (root(4), TREE, fixed(np.arange(30), np.arange(30) - 1)):
        slots = [open_slot(each, TEXT[:100]) for each in (target, other)]
        assert torch.equal(logits(target, slots[0], tree), logits(other, slots[1], tree))
        target.release(slots[0])
        other.release(slots[1])


def test_the_embedded_model_in_int8_stays_close_to_itself_and_has_the_same_bits_in_a_tree(smollm2: Any) -> None:
    target = native_target(smollm2.model, precision="int8", max_slots=2, max_context=256)
    text = smollm2.tokenizer("The capital of France is Paris. The capital of Italy is").input_ids
    tree = fixed(np.array([text[-1], 5, 7, 9, 11]), np.array([-1, 0, 0, 2, 3]))
    slot, path = open_slot(target, text), [0, 2, 3, 4]
    rows = logits(target, slot, tree)
    assert torch.equal(rows[path], row_by_row(target, slot, tree.tokens[path].tolist()))
    with torch.no_grad():
        want = smollm2.model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
    got = rows[0].log_softmax(-1)
    assert got.argmax() == want.argmax() and (want.exp() * (want - got)).sum() < 0.05


# The largest logit alone


def test_the_largest_logit_is_exact_and_the_others_stay_below_where_no_more_is_asked(target: SlotTarget) -> None:
    for length, tree in ((7, TREE), (130, root(4)), (300, fixed(np.arange(30), np.arange(30) - 1))):
        slot = open_slot(target, TEXT[:length])
        full, scores = logits(target, slot, tree), run_trees(target, [slot], [tree], Needs(rounded=True))[0]
        target.release(slot)
        assert scores.logits is not None
        chosen, rows = full.argmax(1), torch.arange(len(tree))
        assert torch.equal(scores.logits.argmax(1), chosen)
        assert torch.equal(scores.logits[rows, chosen], full[rows, chosen])
        screened = target.traits.precision == "float32"
        assert scores.likeliest == (chosen.tolist() if screened else None)
        assert torch.equal(scores.logits, full) != screened


def test_batches_have_their_largest_logits_apart(model: LlamaForCausalLM) -> None:
    target = native_target(model, max_slots=3)
    slots = [open_slot(target, prompt) for prompt in (PROMPT, [5, 4, 3], TEXT[:90])]
    together = run_trees(target, slots, [TREE, root(3), TREE], Needs(rounded=True))
    for slot, tree, scores in zip(slots, [TREE, root(3), TREE], together, strict=True):
        assert scores.likeliest == logits(target, slot, tree).argmax(1).tolist()


def test_a_head_with_a_bias_has_no_screen(model: LlamaForCausalLM) -> None:
    config = LlamaConfig(**zoo.COMMON)
    biased = LlamaForCausalLM(config).eval()
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(config.vocab_size))
    target = native_target(biased, max_slots=1)
    slot = open_slot(target)
    assert torch.equal(run_trees(target, [slot], [TREE], Needs(rounded=True))[0].logits, logits(target, slot))


# Slots


def test_growing_a_tree_level_by_level_equals_one_verify(model: LlamaForCausalLM) -> None:
    level_by_level_equals_one_verify(native_target(model, max_slots=2))


def test_accepted_rows_stay_and_rejected_ones_leave_no_trace(target: SlotTarget) -> None:
    slot, other = open_slot(target, TEXT[:60]), open_slot(target, [*TEXT[:59], *TREE.tokens[[0, 2, 4, 6]].tolist(), 5])
    logits(target, slot)
    twin = target.fork(slot)
    target.commit([slot], [[2, 4, 6]])
    assert torch.equal(logits(target, slot, root(5)), logits(target, other, root(5)))
    assert target.length(twin) == 59
    assert torch.equal(logits(target, twin)[[0]], row_by_row(target, twin, [8]))
    for each in (slot, other, twin):
        target.release(each)


def test_a_released_slot_leaves_nothing_behind(model: LlamaForCausalLM) -> None:
    target = native_target(model, max_slots=1, max_rows=8, cache_bytes=1 << 24)  # all of it is written to
    want = logits(target, slot := open_slot(target))
    for stored in target.backend.cache.store[:2]:
        stored[:] = np.nan
    target.release(slot)
    assert torch.equal(logits(target, open_slot(target)), want)


# What does not fit


def test_a_token_that_the_model_does_not_have_is_refused(target: SlotTarget) -> None:
    slot = open_slot(target)
    for token in (-1, 61):
        with pytest.raises(InputError, match="not one of the model's 61"):
            logits(target, slot, root(token))
    target.release(slot)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt2", "not built like Llama"), ("gemma2", "not built like Llama"), ("phi3", "not built like Llama"),
        ("olmo2", "not built like Llama"), ("mixtral", "experts"), ("granite", "differently from plain forwards"),
    ],
)  # fmt: skip
def test_what_is_not_like_llama_is_refused_with_a_sentence(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why) as caught:
        build(zoo.build(name), "native")
    assert "\n" not in str(caught.value) and "use " in str(caught.value)


def test_layers_without_positions_are_found_at_load() -> None:
    """SmolLM3 has the parts of Llama and leaves every fourth layer unturned."""
    with pytest.raises(UnsupportedModel, match="differently from plain forwards"):
        native_target(small("SmolLM3", num_hidden_layers=4))
    native_target(small("SmolLM3", num_hidden_layers=3))


def test_another_activation_or_device_is_refused(model: LlamaForCausalLM) -> None:
    config = LlamaConfig(**{**zoo.COMMON, "hidden_act": "gelu"})
    with pytest.raises(UnsupportedModel, match="another activation than SiLU.*use openvino or eager"):
        native_target(LlamaForCausalLM(config).eval())
    assert "CPU" in RUNTIMES["native"].obstacle(torch.device("cuda"), "int8")
    with pytest.raises(InputError, match="no precision"):
        build(model, "native", "int8-weights")


@pytest.mark.parametrize("part", ["qkv", "down", "last"])
def test_the_check_at_load_finds_wrong_weights(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    made = native.weights_of

    def wrong(*of: Any) -> Any:
        weights = made(*of)
        right = getattr(weights, part)
        turned = (
            right._replace(values=right.values[::-1].copy()) if isinstance(right, Linear) else right[::-1].copy() * 1.1
        )
        return weights._replace(**{part: turned})

    monkeypatch.setattr(native, "weights_of", wrong)
    monkeypatch.setattr(native, "as_held", lambda model, _: as_held(model, made(model, 8)))
    with pytest.raises(UnsupportedModel, match="differently from plain forwards"):
        native_target(model, precision="int8")


def test_weight_bytes_count_what_a_step_reads(model: LlamaForCausalLM) -> None:
    linears = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    held = {name: native_target(model, precision=name, max_slots=1).traits.weight_bytes for name in BITS}
    head = model.lm_head.weight.numel()  # of which greedy decoding reads eight bits
    assert 4 * (linears - head) + head <= held["float32"] < 4.5 * linears
    assert linears < held["int8"] < held["float32"] / 2
    assert linears / 2 < held["int4"] < held["int8"]
