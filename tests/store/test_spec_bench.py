"""Real text, real model: 40 benchmark prompts decoded token for token as `transformers` does it, with every drafter."""

from __future__ import annotations

import pytest
import torch

from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.control.fixed import Fixed
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.forced import Forced
from outrider.store.prompts import read_prompts
from outrider.verify.invariant import Invariant

pytestmark = pytest.mark.slow

TOKENS = 128
METHODS = ["prompt-lookup", "draft-model", "accept-none"]


@pytest.fixture(scope="module")
def engine(smollm2) -> Outrider:
    return Outrider(smollm2, strict=True, limits={"max_context": 2560})


@pytest.fixture(scope="module")
def prompts(engine: Outrider, shared_data) -> list[list[int]]:
    chosen = per_group(read_prompts(shared_data / "spec_bench" / "question.jsonl"), 7)[:40]
    return [engine.encode_chat(prompt.conversation([])) for prompt in chosen]


@pytest.fixture(scope="module")
def transformers_greedy(engine: Outrider, prompts) -> list[list[int]]:
    model, out = engine.loaded.model, []
    for ids in prompts:
        whole = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        out.append(whole[0, len(ids) :].tolist())
    return out


def batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def generate(engine: Outrider, prompts, recipe: Recipe, size: int = 8, **sampling) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=TOKENS, **sampling)
    out = []
    for batch in batches(prompts, size):
        handles = [engine.engine.submit(ids, params, recipe) for ids in batch]
        out += [handle.result().token_ids for handle in handles]
    return out


def test_plain_decoding_equals_transformers_one_by_one(engine, prompts, transformers_greedy) -> None:
    assert generate(engine, prompts, engine.recipe("plain"), size=1) == transformers_greedy


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_transformers_in_a_ragged_batch(engine, prompts, transformers_greedy, method: str) -> None:
    assert generate(engine, prompts, engine.recipe(method)) == transformers_greedy


@pytest.mark.parametrize("accept", [0.0, 0.7, 1.0])
def test_forced_drafts_equal_transformers(engine, prompts, transformers_greedy, accept: float) -> None:
    answers = {tuple(ids): answer for ids, answer in zip(prompts, transformers_greedy, strict=True)}
    drafter = Forced(lambda c: answers[tuple(c.prompt)], engine.target.vocab_size, accept, decoys=1)
    recipe = Recipe("forced", drafter, Invariant(), Fixed(Budget(12, 6)))
    assert generate(engine, prompts, recipe) == transformers_greedy


def test_seeded_output_is_the_same_for_any_drafter_batch_and_slot_order(engine, prompts) -> None:
    chosen, settings = prompts[::4], {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    plain = generate(engine, chosen, engine.recipe("plain"), size=1, **settings)
    assert generate(engine, chosen, engine.recipe("prompt-lookup"), size=8, **settings) == plain
    assert generate(engine, chosen[::-1], engine.recipe("prompt-lookup"), size=8, **settings)[::-1] == plain
    invariant = engine.recipe("draft-model", {"verifier": "invariant"})
    assert generate(engine, chosen, invariant, size=8, **settings) == plain
