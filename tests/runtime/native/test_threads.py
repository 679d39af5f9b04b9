"""Between steps of the native runtime nothing runs on torch's threads, which would spin on cores that it needs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.api import Outrider
from outrider.constrain.style import Style
from outrider.core.sampling import SamplingParams
from outrider.methods import find
from outrider.models import load_model

VOCABULARY = 151_936  # torch goes parallel from 32,768 values on
PROMPT = [5, 17, 3, 5, 17, 3, 5, 17]
TASKS = Path("/proc/self/task")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy-reshaped": {"repetition_penalty": 1.1, "logit_bias": {3: 1.0}, "bad_words": [(9,)]},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.7, "top_k": 400, "top_p": 0.9, "min_p": 1e-4},
    "flat": {"temperature": 3.0, "top_p": 0.99},  # top-p has to look at the whole row
    "reshaped": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "logprobs": 3},
}
# With every way of sampling, and with one that covers what only they do
DEFAULTS = ("plain", "mix", "suffix")
OTHERS = ("token-recycling", "stand", "jacobi", "lookahead", "omnidraft-ngram", "draft-model", "dyspec", "block-verify")
CASES = [(name, setting) for name in DEFAULTS for setting in SETTINGS] + [
    (name, setting) for name in OTHERS for setting in ("greedy", "truncated")
]

pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")


@pytest.fixture(scope="module")
def engine() -> Iterator[Outrider]:
    """Made on one thread, so that it has no team that would be counted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=1024, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).requires_grad_(False).eval()
    with Outrider(load_model(model), "plain", limits={"max_slots": 3}, strict=True, runtime="native") as made:
        yield made


def wakes_threads(call: Callable[[], object]) -> bool:
    """Whether torch starts threads for `call`: it keeps some for each thread that calls it, from the first need on."""
    found: list[bool | BaseException] = []

    def run() -> None:
        torch.get_num_threads()
        before = set(os.listdir(TASKS))
        try:
            call()
            found.append(not set(os.listdir(TASKS)) <= before)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    torch.set_num_threads(2)
    try:
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(1)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_a_call_that_wakes_torchs_threads_is_noticed() -> None:
    row = torch.zeros(1, VOCABULARY)
    assert wakes_threads(lambda: torch.logsumexp(row, 1))
    assert not wakes_threads(lambda: row.numpy().max())


@pytest.mark.parametrize(("name", "setting"), CASES, ids=lambda value: str(value))
def test_no_step_wakes_torchs_threads(engine: Outrider, name: str, setting: str) -> None:
    fixed = any(option.name == "controller" for option in find(name).option_list)
    recipe = engine.recipe(name, {"controller": "fixed"} if fixed else {})
    params = SamplingParams(max_new_tokens=6, seed=1, **SETTINGS[setting])

    def decode() -> None:
        handles = [engine.engine.submit(prompt, params, recipe) for prompt in (PROMPT, PROMPT[:3])]
        assert all(len(handle.result().token_ids) == 6 for handle in handles)

    assert not wakes_threads(decode)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_constraint_wakes_torchs_threads(engine: Outrider, temperature: float) -> None:
    style = Style.from_tokens([PROMPT], VOCABULARY, special=[2])
    params = SamplingParams(max_new_tokens=3, seed=1, temperature=temperature)
    recipe = engine.recipe("suffix")
    assert not wakes_threads(lambda: engine.engine.submit(PROMPT, params, recipe, constraint=style).result())


def test_a_text_past_the_known_rotary_angles_wakes_no_thread_of_torchs(engine: Outrider) -> None:
    params, recipe = SamplingParams(max_new_tokens=2), engine.recipe("plain")
    assert not wakes_threads(lambda: engine.engine.submit(PROMPT * 90, params, recipe).result())
