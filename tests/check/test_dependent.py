"""Two requests with one seed, the second holding the first's output, for every method under a coupled rule."""

from __future__ import annotations

import pytest

from outrider.check.bugs import BUGS
from outrider.check.dependent import examine
from outrider.check.toy_methods import coupled_methods, one_a_family, toy_recipe, toy_target
from outrider.methods import find
from outrider.methods.recipes import RECIPES

PLANTED = BUGS["noise-by-step"]


@pytest.mark.parametrize("name", coupled_methods())
def test_a_request_that_holds_anothers_output_has_the_targets_distribution(name: str) -> None:
    result = examine(name)
    assert result.passed, f"{result.verifier} rule: {result.difference:.3g} over {result.outcomes} outcomes"


@pytest.mark.parametrize("name", one_a_family())
def test_a_request_that_only_goes_on_has_it_too(name: str) -> None:
    assert examine(name, budget=1, more=()).passed


@pytest.mark.parametrize("name", coupled_methods())
def test_noise_by_the_number_of_the_step_is_caught(name: str) -> None:
    target = toy_target()
    with PLANTED.planted(toy_recipe(name, target), target):
        assert examine(name, budget=1).difference > 0.05


def test_every_method_whose_rule_can_be_chosen_is_among_them() -> None:
    """The others run under the invariant rule, whatever they are asked."""
    assert {info.name for info in RECIPES} - set(coupled_methods()) == {"plain", "accept-none", "ppd", "superposed"}
    assert {find(name).family for name in one_a_family()} == {find(name).family for name in coupled_methods()}
    assert {"draft-model", "jacobi", "stand", "eagle3", "dflash", "mix", "prompt-lookup"} == set(one_a_family())
