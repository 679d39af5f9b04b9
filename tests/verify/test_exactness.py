"""Each verifier's output distribution equals the target's, by enumeration of everything random (tolerance 1e-9)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.drawings import DRAWINGS
from outrider.check.exhaustive import CASES, SHAPES, Case, examine, exhaustive, quick
from outrider.check.toy import ToyLM
from outrider.core.errors import UnsupportedDraws
from outrider.core.protocols import Verifier
from outrider.core.tree import Law
from outrider.verify.block import Block
from outrider.verify.invariant import Invariant
from outrider.verify.kseq import KSeq
from outrider.verify.naive import Naive
from outrider.verify.optimal import Optimal
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from outrider.verify.transport import Transport
from outrider.verify.traversal import Traversal

VERIFIERS: list[Verifier] = [
    Invariant(),
    Rejection(),
    Recursive(),
    Naive(),
    KSeq(),
    Optimal(),
    Block(),
    Traversal(),
    Transport(),
]
CHAINS = ("rejection", "block")
named = pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: v.name)


@named
def test_output_distribution_is_the_targets_for_every_honoured_distribution_and_case(verifier: Verifier) -> None:
    results = quick(verifier)
    assert [r for r in results if not r.passed] == []
    assert {r.law for r in results} == verifier.honours - {Law.NONE}
    assert {r.case for r in results} == {case.name for case in CASES}


@pytest.mark.slow
@named
def test_output_distribution_is_the_targets_for_every_shape_in_every_case(verifier: Verifier) -> None:
    assert [r for r in exhaustive(verifier) if not r.passed] == []


@pytest.mark.parametrize("verifier", [v for v in VERIFIERS if v.name not in CHAINS], ids=lambda v: v.name)
def test_tree_rules_were_tried_on_every_shape(verifier: Verifier) -> None:
    assert {r.shape for r in quick(verifier, [d for d in DRAWINGS if d.law is Law.FIXED])} == set(SHAPES)


@named
@given(
    data=st.data(),
    vocab=st.integers(2, 4),
    seeds=st.tuples(*[st.integers(0, 2**16)] * 3),
    zeros=st.sampled_from([0.0, 0.4]),
    concentration=st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(max_examples=25, deadline=None)
def test_rules_are_exact_on_random_toys(
    verifier: Verifier,
    data: st.DataObject,
    vocab: int,
    seeds: tuple[int, int, int],
    zeros: float,
    concentration: float,
) -> None:
    drawing = data.draw(st.sampled_from([d for d in DRAWINGS if d.law in verifier.honours]))
    shape = data.draw(st.sampled_from([(1,), (1, 1), (1, 1, 1)] if verifier.name in CHAINS else [(3,), (1, 2), (2, 1)]))
    models = [ToyLM(vocab, seed, zeros=zeros, concentration=concentration) for seed in seeds]
    try:
        assert examine(verifier, drawing, shape, Case("random", *models)).passed
    except UnsupportedDraws:  # a law honoured on other shapes only
        assert verifier.name in ("optimal", "transport")


def test_a_claimed_distribution_that_is_always_refused_has_failed() -> None:
    class Boaster(Rejection):
        honours = frozenset(Law)

    results = exhaustive(Boaster(), laws=[Law.WITHOUT_REPLACEMENT], shapes=[(2, 2)], cases=CASES[:1])
    assert [r.passed for r in results] == [False]
