"""Each verifier's output law equals the target's, by enumeration of everything random (tolerance 1e-9)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.drawings import DRAWINGS, Drawing
from outrider.check.exhaustive import CASES, SHAPES, Case, examine, exhaustive, quick
from outrider.check.toy import ToyLM
from outrider.protocols import Verifier
from outrider.tree import Law
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection

VERIFIERS = [Invariant(), Rejection(), Recursive()]
named = pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: v.name)


@named
def test_output_law_is_the_targets_for_every_honoured_law_and_case(verifier: Verifier) -> None:
    results = quick(verifier)
    assert [r for r in results if not r.passed] == []
    assert {r.law for r in results} == verifier.honours - {Law.NONE}
    assert {r.case for r in results} == {case.name for case in CASES}


@pytest.mark.slow
@named
def test_output_law_is_the_targets_for_every_shape_in_every_case(verifier: Verifier) -> None:
    assert [r for r in exhaustive(verifier) if not r.passed] == []


@pytest.mark.parametrize("verifier", [Invariant(), Recursive()], ids=lambda v: v.name)
def test_tree_rules_were_tried_on_every_shape(verifier: Verifier) -> None:
    assert {r.shape for r in quick(verifier, [d for d in DRAWINGS if d.law is Law.FIXED])} == set(SHAPES)


@given(
    drawing=st.sampled_from([d for d in DRAWINGS if d.law in Recursive.honours]),
    vocab=st.integers(3, 5),
    seeds=st.tuples(*[st.integers(0, 2**16)] * 3),
    zeros=st.sampled_from([0.0, 0.4]),
    concentration=st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(max_examples=40, deadline=None)
def test_recursive_is_exact_on_random_toys(
    drawing: Drawing, vocab: int, seeds: tuple[int, int, int], zeros: float, concentration: float
) -> None:
    models = [ToyLM(vocab, seed, zeros=zeros, concentration=concentration) for seed in seeds]
    assert examine(Recursive(), drawing, (3,), Case("random", *models)).passed


def test_a_claimed_law_that_is_always_refused_has_failed() -> None:
    class Boaster(Rejection):
        honours = frozenset(Law)

    results = exhaustive(Boaster(), laws=[Law.WITHOUT_REPLACEMENT], shapes=[(2, 2)], cases=CASES[:1])
    assert [r.passed for r in results] == [False]
