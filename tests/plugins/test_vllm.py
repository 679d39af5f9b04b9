"""vLLM's side of the bargain: what its runners hand over, and what they take."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.plugins.vllm import Proposer
from outrider.plugins.vllm_v2 import HERE, Speculator, _choosing

LOOP = np.array(list(range(12)) * 10, dtype=np.int32)


def config(most: int = 6, length: int = 100, model: str = HERE) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most, method="custom_class", model=model),
        model_config=SimpleNamespace(max_model_len=length), scheduler_config=SimpleNamespace(max_num_seqs=4),
    )  # fmt: skip


def test_drafts_follow_the_text_and_rows_within_their_prompts_get_none() -> None:
    proposer, rows = Proposer(config()), np.zeros((4, 120), dtype=np.int32)
    now = 0.0
    proposer.drafter.clock = lambda: now  # drafting takes no time, a step 50 ms
    rows[0], rows[1], rows[2] = LOOP, LOOP, LOOP
    lengths = np.array([40, 98, 30, 0])
    for _ in range(8):
        now += 0.05
        drafts = proposer.propose([[1], [], [], []], lengths, rows, slot_mappings=None)
        assert drafts[1:] == [[], [], []]
        assert drafts[0] == LOOP[lengths[0] : lengths[0] + len(drafts[0])].tolist() and len(drafts[0]) <= 6
        lengths[0] += len(drafts[0]) + 1
    assert lengths[0] > 40 + 8


def test_a_row_at_the_end_of_the_context_gets_no_draft() -> None:
    proposer, rows = Proposer(config(length=60)), LOOP[None]
    for length in (58, 59, 60):
        assert len(proposer.propose([[1]], np.array([length]), rows)[0]) <= max(60 - length - 1, 0)


def test_the_second_runner_is_given_as_many_drafts_as_it_wants() -> None:
    tokens = torch.from_numpy(np.stack([LOOP, LOOP + 1, LOOP, LOOP]))
    lengths = torch.tensor([40, 41, 42, 0], dtype=torch.int32)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=tokens), total_len=SimpleNamespace(gpu=lengths),
        index_to_req_id={0: "a", 1: "b", 2: "c"},
    )  # fmt: skip
    speculator = Speculator(config(), torch.device("cpu"), states)
    batch = SimpleNamespace(num_reqs=2, idx_mapping=torch.tensor([2, 0, 0, 0]))
    for _ in range(4):
        drafts = speculator.propose(
            batch, None, None, None, None, torch.tensor([1, 1]), torch.tensor([0, 0]), None, None, None, None,
            num_speculative_tokens=6,
        )  # fmt: skip
        lengths[0] += 1
        lengths[2] += 1
    assert tuple(drafts.shape) == (2, 6)
    assert drafts[0].tolist() == LOOP[int(lengths[2]) - 1 : int(lengths[2]) + 5].tolist()


def test_only_our_proposer_is_put_in_the_place_of_vllms_own() -> None:
    made = _choosing(lambda *_: "theirs")
    states = SimpleNamespace()
    assert isinstance(made(config(), torch.device("cpu"), states), Speculator)
    assert made(config(model="somebody.else.Proposer"), torch.device("cpu"), states) == "theirs"


@pytest.mark.parametrize("module", ["outrider.plugins.vllm", "outrider.plugins.vllm_v2", "outrider.plugins.sglang"])
def test_loading_the_plugin_brings_no_compiler_and_no_model_code(module: str) -> None:
    """vLLM's CPU worker does not start where llvmlite was imported before it."""
    script = f"import sys, {module}; print([n for n in ('numba', 'llvmlite', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
