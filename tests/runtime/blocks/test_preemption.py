"""An engine whose cache is too small for what runs: the same texts, and nothing is held when they are done."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.schedule import Terms
from outrider.runtime.blocks.paged import PagedSlots
from outrider.runtime.choice import build
from outrider.runtime.native.cache import SIZE
from outrider.runtime.slots import SlotTarget
from outrider.verify.invariant import Invariant

PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def engine(model: LlamaForCausalLM, blocks: int) -> Engine:
    target = build(model, "native", max_slots=4, max_context=500, cache_bytes=blocks * SIZE * 512)
    assert isinstance(target, SlotTarget)
    return Engine(target, PLAIN)


def slots_of(made: Engine) -> PagedSlots:
    assert isinstance(made.target, SlotTarget) and isinstance(made.target._texts, PagedSlots)
    return made.target._texts


def test_texts_that_do_not_fit_together_are_put_back_and_say_the_same(model: LlamaForCausalLM) -> None:
    """Every text passes the end of its first block while all run."""
    prompts = [[name, *range(1, 31)] * 4 for name in range(40, 45)]
    params = SamplingParams(max_new_tokens=160, temperature=1.0, seed=7)
    roomy, narrow = engine(model, 40), engine(model, 4)
    want = [roomy.submit(prompt, params).result() for prompt in prompts]
    handles = [narrow.submit(prompt, params) for prompt in prompts]
    got = [handle.result() for handle in handles]
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert sum(one.stats.preemptions for one in got) > 0
    slots = slots_of(narrow)
    assert slots.pool.free + len(slots.prefixes) == slots.pool.count == 4 and slots.free_slots == 4


def test_a_cancelled_request_gives_its_blocks_back(model: LlamaForCausalLM) -> None:
    made = engine(model, 40)
    slots, params = slots_of(made), SamplingParams(max_new_tokens=50)
    for number in range(20):
        handle = made.submit([number, *range(60)] * 4, params, terms=Terms(cache_salt="x"))
        for _ in range(number % 5):
            made.step()
        handle.cancel()
        while made.step():
            pass
        assert slots.free_slots == 4 and slots.pool.free + len(slots.prefixes) == slots.pool.count
