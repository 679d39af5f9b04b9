"""The recorded EAGLE-3 drafter in the engine: texts, what cannot be recorded, networks that are exchanged."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.grow.dyspec import Threshold
from outrider.grow.either import Either
from outrider.runtime.layers.recorded import Recording
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from tests.draft.feature.test_eagle3_recorded import PROMPTS, Loop, anything, loaded, net, pair, same

__all__ = ["loaded", "net"]  # fixtures


def engine_run(loaded: Any, drafter: Any, rule: Any = None, **sampling: Any) -> list[Any]:
    plain = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    recipe = plain if drafter is None else Recipe("eagle3", drafter, rule or Invariant(), Fixed(Budget(12, 4)))
    engine = Engine(eager_target(loaded.model, max_slots=4), plain, strict=True)
    handles = [engine.submit(p, SamplingParams(**{"max_new_tokens": 20} | sampling), recipe) for p in PROMPTS]
    return [handle.result() for handle in handles]


def test_greedy_text_is_the_targets(loaded: Any, net: Any) -> None:
    drafter = pair(net, loaded)[0]
    drafted = engine_run(loaded, drafter)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in engine_run(loaded, None)]
    assert sum(g.stats.drafted for g in drafted) > 200 and not drafter._broken


def test_drawn_candidates_go_through_the_source(loaded: Any, net: Any) -> None:
    drafter = pair(net, loaded)[0]
    drafter.sampled, drafter.grower = True, Either(drafter.grower, Threshold(4))
    made: list[bool] = []
    drafter.make = lambda driver: made.append(True)  # type: ignore[func-returns-value]
    results = engine_run(loaded, drafter, Recursive(), temperature=1.0, seed=3)
    assert not made and sum(g.stats.drafted for g in results) > 100


def test_what_cannot_be_recorded_is_said_once_and_drafted_step_by_step(
    loaded: Any, net: Any, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = pair(net, loaded)[0]

    def fails(driver: Any) -> Recording:
        raise RuntimeError("no graph today")

    drafter.make = fails
    drafted = engine_run(loaded, drafter)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in engine_run(loaded, None)]
    assert sum(g.stats.drafted for g in drafted) > 200
    assert len([r for r in caplog.records if "no graph today" in r.message]) == 1


def test_every_depth_is_recorded_with_the_first_proposal(loaded: Any, net: Any) -> None:
    recorded = pair(net, loaded, depth=5)
    loop = Loop(loaded, recorded, anything)
    loop.open(PROMPTS[0])
    loop.step([Budget(12, 1)])
    made = recorded[0]._whole
    assert isinstance(made, Recording) and {depth for _, depth, _ in made._made} == {2, 4, 5}
    forwards = dict(made._made)
    for depth in (2, 3, 4, 5, 1):
        loop.step([Budget(12, depth)])
    assert made._made == forwards and loop.compared == 6  # nothing was recorded in the middle of the text


def test_what_was_prepared_serves_every_batch_and_depth(loaded: Any, net: Any) -> None:
    recorded = pair(net, loaded, depth=5)
    recorded[0].prepare(6)
    made = recorded[0]._whole
    assert isinstance(made, Recording) and {batch for batch, _, _ in made._made} == {1, 4, 16}
    made.cache.reserve(8, 600)
    recorded[0].prepare(6)
    forwards = dict(made._made)
    loop = Loop(loaded, recorded, anything)
    for prompt in PROMPTS[:4]:
        loop.open(prompt)
        for depth in (1, 3, 5):
            loop.step([Budget(12, depth)] * len(loop.texts))
    assert made._made == forwards and loop.compared > 25


def test_a_network_that_is_exchanged_is_recorded_anew(loaded: Any, net: Any) -> None:
    drafters = pair(net, loaded)
    loop = Loop(loaded, drafters, anything)
    loop.open(PROMPTS[0])
    loop.step([Budget(12, 5)])
    torch.manual_seed(9)
    other = copy.deepcopy(net)
    for weight in other.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    for drafter in drafters:
        drafter.source.driver = drafter.source.driver.renewed(other)
    for _ in range(4):
        loop.step([Budget(12, 5)])
    assert loop.compared == 5


def test_the_shipped_drafter_on_the_embedded_model(smollm2: Any) -> None:
    """Float32: what text the target says decides what is accepted."""
    from outrider.models.drafts import shipped_draft
    from outrider.models.trained import load_eagle3

    folder = shipped_draft(smollm2, "eagle3")
    assert folder is not None
    recorded, grown = pair(load_eagle3(folder, smollm2), smollm2, beam=10, branch=10, depth=6)
    plain = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    engine = Engine(eager_target(smollm2.model, max_slots=1), plain, strict=True)
    lengths = []

    class Both:
        name, shared_noise, needs = "eagle3", False, recorded.needs

        def begin(self, slot: int, context: Any) -> None:
            for drafter in (recorded, grown):
                drafter.begin(slot, context)

        def absorb(self, chunks: Any) -> None:
            for drafter in (recorded, grown):
                drafter.absorb(chunks)

        def end(self, slot: int) -> None: ...
        def propose(self, *asked: Any) -> Any:
            found, other = recorded.propose(*asked), grown.propose(*asked)
            same(found[0], other[0])
            return found

        def observe(self, slots: Any, records: Any) -> None:
            lengths.extend(record.gain for record in records)
            for drafter in (recorded, grown):
                drafter.observe(slots, records)

    prompt = smollm2.tokenizer.encode("Once upon a time, in a small village by the sea, there lived")
    recipe = Recipe("eagle3", Both(), Invariant(), Fixed(Budget(24, 6)))
    engine.submit(prompt, SamplingParams(max_new_tokens=24), recipe).result()
    assert not recorded._broken and np.mean(lengths) > 1.5
