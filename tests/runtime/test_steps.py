"""The runtime's promises besides the logits: slots, bounds, hidden states, refusals, and a model left as it was."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.errors import InputError, OutriderError, UnsupportedModel
from outrider.core.records import Needs, Piece, Scores
from outrider.core.tree import TokenTree, chain, fixed, root
from outrider.runtime import support
from outrider.runtime.eager import backend as eager
from outrider.runtime.slots import SlotTarget
from outrider.runtime.support import context_limit
from outrider.runtime.targets import eager_target
from tests.runtime.running import run_text, run_trees, shorter_prefixes, together_and_apart

VOCAB, CONTEXT = 61, 40
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT = [5, 9, 33, 2, 17, 40, 8]
TREE = fixed(np.array([8, 3, 4, 12, 50, 22, 7]), np.array([-1, 0, 0, 1, 2, 2, 4]))


def small(kind: str = "Llama", *, head: str = "ForCausalLM", **extra: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **extra})
    return getattr(transformers, f"{kind}{head}")(config).eval()


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small()


@pytest.fixture
def target(model: LlamaForCausalLM) -> SlotTarget:
    return eager_target(model, max_slots=4, max_rows=16)


def open_slot(target: SlotTarget, prompt: list[int] = PROMPT) -> int:
    slot = target.acquire()
    run_text(target, [slot], [prompt], Needs())
    return slot


def logits(target: SlotTarget, slot: int, tree: TokenTree = TREE) -> torch.Tensor:
    (scores,) = run_trees(target, [slot], [tree], Needs())
    assert scores.logits is not None
    return scores.logits.clone()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-4)


# Scores


def test_hidden_states_are_transformers_own(model: LlamaForCausalLM, target: SlotTarget) -> None:
    needs, text = Needs(hidden=(0, 2, -1)), [*PROMPT, 3, 12]
    with torch.no_grad():
        plain = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    slot = target.acquire()
    chunks = [c for step in run_text(target, [slot], [PROMPT], needs) for c in step]
    (scores,) = run_trees(target, [slot], [TREE], needs)
    for layer in needs.hidden:
        assert close(torch.cat([c.scores.hidden[layer] for c in chunks]), plain[layer][0, : len(PROMPT) - 1])
        assert close(scores.hidden[layer][[0, 1, 3]], plain[layer][0, len(PROMPT) - 1 :])
    assert len(scores.hidden[-1]) == len(TREE)


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_prefill_yields_what_was_asked_for_and_leaves_the_last_token_pending(model: Any, chunk: int) -> None:
    target = eager_target(model, max_slots=2, prompt_rows=chunk)
    prompts = [PROMPT, PROMPT[:3]]
    slots = [target.acquire(), target.acquire()]
    rows: dict[int, list[Scores]] = {s: [] for s in slots}
    seen: dict[int, list[int]] = {s: [] for s in slots}
    for step in run_text(target, slots, prompts, Needs(logits=True)):
        for c in step:
            assert c.start == len(seen[c.slot])
            seen[c.slot] += c.tokens
            rows[c.slot].append(c.scores)
    for slot, prompt in zip(slots, prompts, strict=True):
        assert seen[slot] == prompt[:-1]
        assert target.length(slot) == len(prompt) - 1
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0, :-1]
        assert close(torch.cat([s.logits for s in rows[slot] if s.logits is not None]), want)
    extra = run_text(target, [slots[1]], [[4, 5]], Needs())
    assert all(c.scores.logits is None for step in extra for c in step)


def level_by_level_equals_one_verify(target: SlotTarget) -> None:
    slots = [open_slot(target), open_slot(target, PROMPT[:4])]
    whole = [s.logits.clone() for s in run_trees(target, slots, [TREE, TREE], Needs())]
    levels: list[list[torch.Tensor]] = [[], []]
    for done, upto in [((0, 0), (1, 3)), ((1, 3), (3, 4)), ((3, 4), (7, 7))]:
        part = [TREE.keep(range(n)) for n in upto]
        for i, s in enumerate(run_trees(target, slots, part, Needs(), done=done)):
            assert s.logits is not None
            levels[i].append(s.logits.clone())
    for i in range(2):
        assert close(torch.cat(levels[i]), whole[i])


def test_growing_a_tree_level_by_level_equals_one_verify(target: SlotTarget) -> None:
    level_by_level_equals_one_verify(target)


@pytest.mark.parametrize("text", [[4, 5], list(range(25))])  # one as wide as the tree, and one of mostly padding
def test_text_and_trees_together_equal_separate_passes(target: SlotTarget, text: list[int]) -> None:
    for one, two in together_and_apart(target, PROMPT, TREE, text):
        assert close(one.logits, two.logits)


@pytest.mark.parametrize("length", [1, 5, 20])
def test_a_shorter_prefix_is_as_if_there_had_been_no_more(target: SlotTarget, length: int) -> None:
    for want, got in shorter_prefixes(target, [n % VOCAB for n in range(3, 33)], length):
        assert close(want.logits, got.logits)


def test_texts_of_different_lengths_share_a_pass(target: SlotTarget, model: LlamaForCausalLM) -> None:
    texts = [PROMPT, PROMPT[:1], PROMPT[2:]]
    pieces = [Piece(target.acquire(), text) for text in texts]
    for text, scores in zip(texts, target.run(pieces, Needs(logits=True)), strict=True):
        with torch.no_grad():
            assert close(scores.logits, model(torch.tensor([text])).logits[0])


def test_a_rejected_tree_leaves_no_trace(target: SlotTarget) -> None:
    slot = open_slot(target)
    before = logits(target, slot)
    logits(target, slot, chain(8, list(range(15))))
    assert close(logits(target, slot), before)


def test_results_do_not_depend_on_slot_order(target: SlotTarget) -> None:
    slots = [open_slot(target, PROMPT[:n]) for n in (7, 2, 5, 1)]
    alone = {s: logits(target, s) for s in slots}
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 3]):
        batch = [slots[i] for i in order]
        for slot, scores in zip(batch, run_trees(target, batch, [TREE] * len(batch), Needs()), strict=True):
            assert scores.logits is not None
            assert close(scores.logits, alone[slot])


def test_bfloat16_follows_the_model() -> None:
    model = small().to(torch.bfloat16)
    target = eager_target(model, max_slots=2, self_test=True)
    got = logits(target, open_slot(target))
    with torch.no_grad():
        want = model(torch.tensor([[*PROMPT, 3, 12]])).logits[0, -3:]
    assert got.dtype == torch.bfloat16
    assert (got[[0, 1, 3]].float() - want.float()).abs().max() < 0.05 * want.float().abs().max()


# Slots and bounds


def test_slots_run_out_with_an_error_and_come_back_lowest_first(target: SlotTarget) -> None:
    slots = [target.acquire() for _ in range(4)]
    assert (slots, target.free_slots) == ([0, 1, 2, 3], 0)
    with pytest.raises(OutriderError, match="all 4 slots are in use"):
        target.acquire()
    target.release(2)
    target.release(0)
    assert [target.acquire(), target.acquire()] == [0, 2]
    target.release(1)
    with pytest.raises(OutriderError, match="not in use"):
        target.release(1)


def test_forks_go_their_own_ways(target: SlotTarget) -> None:
    slot = open_slot(target)
    before = logits(target, slot)
    twin = target.fork(slot)
    assert target.length(twin) == target.length(slot)
    assert close(logits(target, twin), before)
    target.commit([twin], [[2, 5]])
    assert close(logits(target, slot), before)
    after = logits(target, twin, root(11))
    target.release(slot)
    open_slot(target, [1, 2, 3])
    assert close(logits(target, twin, root(11)), after)


def test_a_released_slot_leaves_nothing_behind(target: SlotTarget) -> None:
    """Even an overflow: masked rows have weight 0, and 0 times infinity would reach the next one in the batch."""
    long, short = open_slot(target), open_slot(target, PROMPT[:2])
    want = [s.logits.clone() for s in run_trees(target, [long, short], [TREE, TREE], Needs())]
    rejected = chain(8, [3] * 12)  # reaches beyond what the next sequence will write
    logits(target, short, rejected)
    for stored in target.backend.cache.blocks[0]:
        stored[:, short, :, : target.length(short) + len(rejected)] = torch.inf
    target.release(short)
    assert open_slot(target, PROMPT[:2]) == short
    for scores, before in zip(run_trees(target, [long, short], [TREE, TREE], Needs()), want, strict=True):
        assert close(scores.logits, before)


def test_the_cache_stays_within_its_bytes(model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture) -> None:
    token = 3 * 2 * (8 + 8) * 4  # layers, heads, dims, bytes
    whole = eager_target(model, max_slots=4, max_rows=8)
    assert whole.cache_bytes == 4 * token * (CONTEXT + 8 + 1)
    fewer = eager_target(model, max_slots=4, max_rows=8, cache_bytes=whole.cache_bytes - 1)
    assert (fewer.slots, fewer.max_context) == (3, CONTEXT)
    with caplog.at_level(logging.WARNING):
        less = eager_target(model, max_slots=4, max_rows=8, cache_bytes=token * 30)
    assert (less.slots, less.max_context) == (1, 30 - 8 - 1)
    assert less.cache_bytes <= token * 30
    assert "cut from 40 to 21" in caplog.text
    with pytest.raises(InputError, match="raise cache_bytes"):
        eager_target(model, max_rows=8, cache_bytes=token * 9)


def test_what_does_not_fit_is_refused_before_it_runs(target: SlotTarget) -> None:
    slot = target.acquire()
    with pytest.raises(InputError, match="longer than the context of 40"):
        run_text(target, [slot], [[1] * 41], Needs())
    with pytest.raises(InputError, match="empty"):
        target.run([Piece(slot)], Needs())
    run_text(target, [slot], [[1] * 40], Needs())
    logits(target, slot, root(1))
    with pytest.raises(InputError, match="draft less"):
        run_trees(target, [slot], [chain(1, [2])], Needs())
    target.release(slot)
    with pytest.raises(InputError, match="draft less"):
        run_trees(target, [target.acquire()], [chain(1, [2] * 16)], Needs())


def test_context_ends_where_rope_would_change() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.Phi3Config(
        **{**SMALL, "max_position_embeddings": 160},
        original_max_position_embeddings=40,
        rope_parameters={**long, "original_max_position_embeddings": 40},
    )
    assert context_limit(config) == (40, "long-rope switches its frequencies there")
    assert context_limit(LlamaConfig(**SMALL))[0] == CONTEXT


@pytest.mark.parametrize("name", ["max_target_positions", "n_ctx", "max_seq_length", "max_decoder_position_embeddings"])
def test_the_context_ends_where_the_configuration_says_by_any_name(name: str) -> None:
    assert context_limit(transformers.PreTrainedConfig(**{name: CONTEXT})) == (
        CONTEXT, "the model's positions end there",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["GPT2", "OPT", "Bart"])
def test_the_context_ends_with_a_table_of_positions_that_no_setting_names(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "LIMITS", ())
    options = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "is_encoder_decoder": False}
    model = small(kind, head="LMHeadModel" if kind == "GPT2" else "ForCausalLM", **options)
    target = eager_target(model, max_slots=1, max_rows=4)
    assert target.max_context == CONTEXT
    logits(target, open_slot(target, [1] * CONTEXT), root(1))


# The caller's model


def test_the_model_is_left_as_it_was(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, settings = torch.tensor([PROMPT]), {"max_new_tokens": 6, "do_sample": False}
    implementation = model.config._attn_implementation
    before = model.generate(prompt, **settings)
    target = eager_target(model)
    slot = open_slot(target)
    target.run([Piece(target.acquire(), PROMPT * 2)], Needs())
    assert model.config._attn_implementation == implementation
    assert torch.equal(model.generate(prompt, **settings), before)
    monkeypatch.setattr(eager.SlotCache, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(target, slot)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model.generate(prompt, **settings), before)


def test_a_models_own_bias_function_is_put_back() -> None:
    from transformers.models.falcon import modeling_falcon

    build = modeling_falcon.build_alibi_tensor
    target = eager_target(small("Falcon", alibi=True), max_slots=1)
    open_slot(target)
    assert modeling_falcon.build_alibi_tensor is build


def test_a_model_in_training_mode_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match=r"model\.eval"):
        eager_target(model.train())


# Refusals and the check at load


LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "attn_implementation": "eager",
}  # fmt: skip
INDEXED = {**LATENT, "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}


@pytest.mark.parametrize(
    ("kind", "head", "extra", "sentence"),
    [
        ("xLSTM", "ForCausalLM", {}, "recurrent or state-space"),
        ("Zaya", "ForCausalLM", {"num_hidden_layers": 4}, r"recurrent or state-space layers \(hybrid\)"),
        ("T5", "ForConditionalGeneration", {"d_model": 32, "num_layers": 1}, "encoder-decoder"),
        ("GPT2", "LMHeadModel", {"add_cross_attention": True}, "cross-attention"),
        ("Llama", "Model", {}, "no language-model head"),
        ("Bert", "LMHeadModel", {"is_decoder": False}, "differently from plain forwards"),
        ("Roberta", "ForCausalLM", {"is_decoder": True}, "counts positions from its padding id"),
        ("OpenAIGPT", "LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 4}, "takes no key/value cache"),
        ("CpmAnt", "ForCausalLM", {"dim_head": 8, "dim_ff": 40}, "stores 34 rows for 2 tokens"),
        ("DeepseekV32", "ForCausalLM", INDEXED, r"sparse attention \(indexed_attention\): .* index keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_with_a_sentence(kind: str, head: str, extra: Any, sentence: str) -> None:
    model = small(kind, head=head, **{"num_hidden_layers": 2, **extra})
    with pytest.raises(UnsupportedModel, match=sentence) as caught:
        eager_target(model)
    assert "\n" not in str(caught.value)
    assert "recurrent" in sentence or "recurrent" not in str(caught.value)


def test_a_model_that_does_not_run_by_itself_is_refused_for_that() -> None:
    model = small("DeepseekV3", **LATENT, num_key_value_heads=2)  # four heads of queries need as many keys there
    with pytest.raises(UnsupportedModel, match="does not run by itself either: a plain forward of 20 tokens"):
        eager_target(model, self_test=True)


@pytest.mark.parametrize("kind", ["Glm", "Olmo", "Jais2"])
def test_an_architecture_nobody_named_is_checked_and_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    check = eager.self_check
    monkeypatch.setattr(eager, "self_check", lambda backend, t: (calls.append(t), check(backend, t)))
    target = eager_target(small(kind), max_slots=2)
    assert calls == [target]
    assert target.free_slots == 2


def test_the_check_at_load_finds_a_wrong_mask(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenTree, "ancestor_mask", lambda self: np.tri(len(self), dtype=bool))
    with pytest.raises(UnsupportedModel, match="differently from plain forwards"):
        eager_target(model, self_test=True)
    eager_target(model)
