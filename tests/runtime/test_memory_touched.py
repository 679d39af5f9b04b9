"""What a cache touches: as much as its texts need, whatever they may ever need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.records import Needs
from outrider.core.tree import root
from outrider.runtime.targets import eager_target, native_target
from tests.runtime.running import run_text, run_trees

STATM = Path("/proc/self/statm")


def resident() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def long_llama() -> LlamaForCausalLM:
    """2 MB of keys a layer and head: a page of the largest size in common use."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.skipif(not STATM.exists(), reason="this system does not say how much memory is touched")
@pytest.mark.parametrize("runtime", [eager_target, native_target])
def test_eight_short_texts_do_not_touch_eight_whole_contexts(runtime: Any) -> None:
    target = runtime(long_llama(), max_slots=8)
    assert target.cache_bytes > 500 << 20
    before = resident()
    slots = [target.acquire() for _ in range(8)]
    run_text(target, slots, [[3, 14, 15, 9, 26]] * 8, Needs())
    run_trees(target, slots, [root(5)] * 8, Needs())
    target.commit(slots, [[]] * 8)
    twin_of = slots.pop()
    target.release(twin_of)
    target.fork(slots[0])
    assert resident() - before < target.cache_bytes // 8


def test_a_slot_is_forgotten_as_far_as_it_was_used() -> None:
    pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")
    from outrider.runtime.openvino.cache import RowCache
    from outrider.runtime.openvino.convert import BLOCK, CacheTensors
    from outrider.runtime.probe import probe

    cache = RowCache(CacheTensors(probe(long_llama()).shapes), 2)
    cache.fill(0, 5 * BLOCK)
    cache.fill(1, BLOCK + 3)
    for blocks in cache._blocks:
        assert blocks[:, 1, 0].any() and not blocks[:, 1, 1:].any()
        blocks[:, 1, 1:] = np.nan  # what was never written shows where it is written to
    cache.wipe(1)
    for blocks in cache._blocks:
        assert not blocks[:, 1, 0].any() and np.isnan(blocks[:, 1, 1:]).all()
    cache.wipe(0)
    assert cache.bytes == 0
