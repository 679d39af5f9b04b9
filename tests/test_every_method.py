"""Every registered method, through the same loop: greedy text is plain's, sampled runs end, statistics add up."""

from __future__ import annotations

import pytest

from outrider import methods
from outrider.api import Outrider
from outrider.sampling import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [5], [6, 7, 6, 7, 6]]
NAMES = [info.name for info in methods.table()]


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Outrider:
    return Outrider(tiny_llama, "plain", strict=True)


def run(engine: Outrider, recipe, **sampling) -> list:
    params = SamplingParams(max_new_tokens=24, **sampling)
    handles = [engine.engine.submit(prompt, params, recipe) for prompt in PROMPTS]
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plains_and_counts_add_up(engine: Outrider, name: str) -> None:
    plain = run(engine, engine.recipe("plain"))
    for results in (run(engine, engine.recipe(name)), run(engine, engine.recipe(name), temperature=0.9, seed=3)):
        for result in results:
            assert result.stats.new_tokens == len(result.token_ids) == len(result.origins)
            assert result.stats.accepted == sum(origin.depth > 0 for origin in result.origins)
            assert result.stats.drafted >= result.stats.accepted
    assert [g.token_ids for g in run(engine, engine.recipe(name))] == [g.token_ids for g in plain]


WITH_A_CHOICE = [info.name for info in methods.table() if any(o.name == "verifier" for o in info.option_list)]


@pytest.mark.parametrize("name", WITH_A_CHOICE)
def test_the_invariant_rule_gives_every_drafter_plains_sampled_text(engine: Outrider, name: str) -> None:
    settings = {"temperature": 0.8, "seed": 5, "top_k": 30}
    plain = run(engine, engine.recipe("plain"), **settings)
    same = run(engine, engine.recipe(name, {"verifier": "invariant"}), **settings)
    assert [g.token_ids for g in same] == [g.token_ids for g in plain]
