"""Every registered method, through the same loop: greedy text is plain's, sampled runs end, statistics add up.

Methods with a trained drafter get one of two updates: exact it must be whatever it proposes.
"""

from __future__ import annotations

import pytest

from outrider import methods
from outrider.api import Outrider
from outrider.core.sampling import SamplingParams
from tests.drafters import TRAINED, drafter, some_text

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [5], [6, 7, 6, 7, 6]]
NAMES = [info.name for info in methods.table()]


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Outrider:
    return Outrider(tiny_llama, "plain", strict=True)


@pytest.fixture(scope="module")
def needed(tiny_llama, tmp_path_factory) -> dict[str, dict[str, str]]:
    """Options without which a method cannot be built."""
    folder = tmp_path_factory.mktemp("drafters")
    text = some_text(tiny_llama, folder / "text")
    made = {kind: {"drafter": str(drafter(kind, tiny_llama, text, folder / kind, steps=2))} for kind in TRAINED}
    return made | {"diffuspec": made["deer"]}


def run(engine: Outrider, recipe, **sampling) -> list:
    params = SamplingParams(max_new_tokens=24, **sampling)
    handles = [engine.engine.submit(prompt, params, recipe) for prompt in PROMPTS]
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_plains_and_counts_add_up(engine: Outrider, name: str, needed) -> None:
    plain, options = run(engine, engine.recipe("plain")), needed.get(name, {})
    for results in (
        run(engine, engine.recipe(name, options)),
        run(engine, engine.recipe(name, options), temperature=0.9, seed=3),
    ):
        for result in results:
            assert result.stats.new_tokens == len(result.token_ids) == len(result.origins)
            assert result.stats.accepted == sum(origin.depth > 0 for origin in result.origins)
            assert result.stats.drafted >= result.stats.accepted
    assert [g.token_ids for g in run(engine, engine.recipe(name, options))] == [g.token_ids for g in plain]


WITH_A_CHOICE = [info.name for info in methods.table() if any(o.name == "verifier" for o in info.option_list)]


@pytest.mark.parametrize("name", WITH_A_CHOICE)
def test_the_invariant_rule_gives_every_drafter_plains_sampled_text(engine: Outrider, name: str, needed) -> None:
    settings = {"temperature": 0.8, "seed": 5, "top_k": 30}
    plain = run(engine, engine.recipe("plain"), **settings)
    same = run(engine, engine.recipe(name, {"verifier": "invariant", **needed.get(name, {})}), **settings)
    assert [g.token_ids for g in same] == [g.token_ids for g in plain]


@pytest.mark.parametrize("context", [32, 64])
def test_costs_of_a_short_context_are_measured_and_the_text_is_plains(tiny_llama, context: int) -> None:
    short = Outrider(tiny_llama, "plain", limits={"max_context": context}, strict=True)
    plain = run(short, short.recipe("plain"))
    assert [g.token_ids for g in run(short, short.recipe("cost-aware-tree"))] == [g.token_ids for g in plain]
