"""The draft model: its cache follows the target's text exactly, whatever was accepted; drafting with the target itself
is accepted whole."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.proposals import Proposals
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.core.tree import chain
from outrider.draft.grown import Grown
from outrider.draft.model.draft_model import ModelSource
from outrider.grow.chain import Chain
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from tests.watched import Watched, llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama(1)


def outputs(engine: Engine, params: SamplingParams, recipe: Recipe) -> list:
    handles = [engine.submit(p, params, recipe) for p in PROMPTS]
    return [h.result() for h in handles]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafts_cache_equals_a_fresh_prefill_after_every_step(target, temperature: float) -> None:
    source = Watched(eager_target(llama(2), max_slots=8))
    engine = Engine(eager_target(target, max_slots=4), PLAIN, strict=True)
    recipe = Recipe("draft", Grown(source, Chain(), sampled=True), Rejection(), Fixed(Budget(4, 4)))
    params = SamplingParams(max_new_tokens=25, temperature=temperature, seed=3)
    Watched.steps = Watched.lag = 0
    results = outputs(engine, params, recipe)
    assert Watched.steps > 30 and Watched.lag == 2
    if temperature == 0:
        assert [g.token_ids for g in results] == [g.token_ids for g in outputs(engine, params, PLAIN)]


@pytest.mark.parametrize("verifier", [Invariant(), Rejection(), Recursive()])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_target_as_its_own_draft_is_accepted_whole_unless_noise_decides(target, verifier, temperature) -> None:
    source = ModelSource(eager_target(target, max_slots=4), width=53)
    engine = Engine(eager_target(target, max_slots=4), PLAIN, strict=True)
    recipe = Recipe("self", Grown(source, Chain(), sampled=verifier.coupled), verifier, Fixed(Budget(4, 4)))
    results = outputs(engine, SamplingParams(max_new_tokens=30, temperature=temperature, seed=8), recipe)
    mean = np.mean([g.stats.mean_accepted for g in results])
    if temperature == 0 or verifier.coupled:
        assert mean > 4.9  # q = p: everything is accepted
    else:
        assert 1.2 < mean < 4.9  # the likeliest token is not always what the noise picks


def test_a_draft_that_was_switched_off_catches_up(target) -> None:
    class OnAndOff:
        name, calls = "on-and-off", 0

        def begin(self, slot) -> None: ...
        def end(self, slot) -> None: ...
        def observe(self, slots, records, timing) -> None: ...
        def size(self, slots, proposals, budgets, load, seconds):
            return list(proposals)

        def plan(self, slots, limits, load):
            self.calls += 1
            wanted = Budget(0, 0) if self.calls % 40 < 30 else Budget(3, 3)
            return [wanted & limit for limit in limits]

    source = ModelSource(eager_target(target, max_slots=4, max_rows=16))
    engine = Engine(eager_target(target, max_slots=4), PLAIN, strict=True)
    recipe = Recipe("self", Grown(source, Chain()), Invariant(), OnAndOff())
    params = SamplingParams(max_new_tokens=100)
    results = outputs(engine, params, recipe)
    assert [g.token_ids for g in results] == [g.token_ids for g in outputs(engine, params, PLAIN)]
    assert results[0].stats.acceptance_by_depth == [1.0, 1.0, 1.0]


def test_a_step_in_which_only_others_drafted_leaves_the_drafts_cache_alone() -> None:
    class EverySecondStep(Grown):
        asked = 0

        def propose(self, slots, budgets, noise):
            type(self).asked += 1
            if self.asked % 2:
                return super().propose(slots, budgets, noise)
            pending = [int(self._contexts[slot].tokens[-1]) for slot in slots]
            drafts = [chain(token, [0, 1][: budget.depth]) for token, budget in zip(pending, budgets, strict=True)]
            return Proposals(drafts)

    source = ModelSource(ToyTarget(ToyLM(3, seed=7)))
    recipe = Recipe("draft", EverySecondStep(source, Chain(), sampled=True), Rejection(), Fixed(Budget(2, 2)))
    engine = Engine(ToyTarget(ToyLM(3, seed=11)), recipe, strict=True)
    for seed in range(5):
        result = engine.submit([0, 1, 2], SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)).result()
        assert result.stats.new_tokens == 30 and result.stats.drafter_failures == 0
