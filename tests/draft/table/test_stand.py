"""STAND: entries are means, draws are without replacement and exact, contexts stay apart, memory is bounded."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from outrider.check.enumeration import outcomes
from outrider.check.exhaustive import CASES, CONTEXT, TOLERANCE, Case, distance, step_distribution
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.noise import DRAFT, StreamNoise
from outrider.core.protocols import Recipe
from outrider.core.records import Budget, Chunk, Scores, StepRecord, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.tree import Law, fixed
from outrider.draft.table import ngram_distributions as ngram_distributions
from outrider.draft.table.positions import parse, positions, written
from outrider.draft.table.stand import DEFAULT_SHAPE, Stand, fill_by_noise
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.traversal import Traversal
from tests.draft.toy_loop import distribution_gap, history, spelled, step

V = 8
SMALL = 1 << 20


def stand(vocab_size: int = V, **options) -> Stand:
    return Stand(vocab_size, **{"memory_bytes": SMALL, "shortest": 2, **options})


def knowing(lm: ToyLM, context=CONTEXT, depth: int = 3, **options) -> Stand:
    """A table with the toy's distributions after every text of up to `depth` tokens below the context."""
    drafter = stand(lm.vocab, **options)
    for length in range(depth + 1):
        for text in product(range(lm.vocab), repeat=length):
            tokens = [*context, *text]
            drafter.begin(9, past := history(tokens, lm.vocab))
            step(drafter, 9, past, np.log(np.maximum(lm.probs(tokens), 1e-30)), 0)
            drafter.end(9)
    return drafter


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_an_entry_is_the_mean_of_all_distributions_seen(seed: int, times: int) -> None:
    source = np.random.default_rng(seed)
    seen = source.dirichlet(np.ones(V), times)
    drafter = stand()
    for probs in seen:
        drafter.begin(0, past := history([3, 1, 4], V, temperature=1.0))
        step(drafter, 0, past, np.log(probs), 5)
    drafter.begin(0, history([3, 1, 4], V, temperature=1.0))
    row = drafter.distribution(0)
    np.testing.assert_allclose(row.probs[np.argsort(row.ids)], seen.mean(0), atol=1e-5)


def test_the_worked_example() -> None:
    drafter = stand(candidates=4)
    for probs in ([0.7, 0.2, 0.05, 1e-9], [0.3, 0.6, 1e-9, 0.05]):
        drafter.begin(0, past := history([6, 7], V))
        step(drafter, 0, past, np.log([*probs, 0.05 - 2e-9, *[1e-12] * 3]), 5)
    stored = drafter.memory()
    (entry,) = np.nonzero(stored["counts"] == 2)[0]
    values = dict(zip(stored["ids"][entry].tolist(), stored["values"][entry].tolist(), strict=True))
    assert [values[token] for token in (0, 1)] == pytest.approx([0.5, 0.4], abs=1e-6)


def test_reading_re_tempers_what_was_stored_at_temperature_one() -> None:
    probs = np.random.default_rng(1).dirichlet(np.ones(V))
    drafter = stand()
    drafter.begin(0, past := history([6, 7], V))
    step(drafter, 0, past, np.log(probs), 5)
    for temperature in (0.3, 0.5, 1.0, 2.0):
        drafter.begin(1, history([6, 7], V, temperature))
        row, want = drafter.distribution(1), probs ** (1 / temperature)
        np.testing.assert_allclose(row.probs, (want / want.sum())[row.ids], atol=1e-5)


def test_the_longest_known_context_answers() -> None:
    drafter = stand()
    rows = torch.full((5, V), -20.0)
    for place, token in enumerate((4, 5, 6, 7, 0)):
        rows[place, token] = 5.0
    # contexts .. 1 2 -> 5 (position 1); 3 2 1 2 -> 0 (position 4)
    drafter.begin(0, history([1, 2, 3, 2, 1, 2], V))
    drafter.absorb([Chunk(0, 0, [1, 2, 3, 2, 1], Scores(rows))])
    assert drafter.distribution(0).ids[0] == 5  # only the last two tokens are known before the last
    assert drafter.distribution(0, [3]).ids[0] == 6  # 1 2 3
    assert drafter.distribution(0, [7, 7]).ids.size == 0


def test_rejected_candidates_teach_only_where_asked() -> None:
    tree = fixed(np.array([2, 4, 6]), np.array([-1, 0, 0]))
    for rejected in (False, True):
        drafter = stand(learn_rejected=rejected)
        drafter.begin(0, past := history([1, 2], V))
        past.append([4, 5])
        drafter.observe([0], [StepRecord(tree, Verdict((1,), 5), (4, 5), Scores(torch.randn(3, V)))])
        drafter.begin(1, history([1, 2, 6], V))
        assert (drafter.distribution(1).ids.size > 0) is rejected
        drafter.begin(1, history([1, 2, 4], V))
        assert drafter.distribution(1).ids.size > 0


# drawing


def ordered_children(drafter: Stand, noise) -> tuple[int, ...]:
    (tree,) = drafter.propose([0], [Budget(3, 1)], [noise])
    return tuple(draw.token for draw in tree.draws[0])


def wide(lm: ToyLM) -> Stand:
    drafter = knowing(lm, depth=0, shape=positions(parse("0 1 2")))
    drafter.begin(0, history(CONTEXT, lm.vocab, temperature=1.0))
    return drafter


def without_replacement(row) -> dict[tuple[int, ...], float]:
    """Ordered draws of three, by hand."""
    probs = dict(zip(row.ids.tolist(), row.probs.tolist(), strict=True))
    chances = {}
    for order in permutations(probs, 3):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * probs[token] / left, left - probs[token]
        chances[order] = chance
    return chances


def test_children_are_drawn_without_replacement_in_order() -> None:
    drafter = wide(ToyLM(5, seed=2))
    want = without_replacement(drafter.distribution(0))
    found = outcomes(lambda paths: ordered_children(drafter, paths.noise("draft")))
    assert found.keys() == want.keys()
    assert all(found[order] == pytest.approx(want[order], abs=1e-12) for order in want)


def test_real_noise_draws_by_the_same_distribution() -> None:
    """Chi-square over 6000 fixed seeds; a false alarm at 1e-3 would be there every time, and is not."""
    drafter = wide(ToyLM(5, seed=2))
    want = without_replacement(drafter.distribution(0))
    drawn = [ordered_children(drafter, StreamNoise(seed, 0, DRAFT, 0, 0)) for seed in range(6000)]
    counts = [drawn.count(order) for order in want]
    assert sum(counts) == len(drawn)
    assert chisquare(counts, [chance * len(drawn) for chance in want.values()]).pvalue > 1e-3


@given(st.integers(0, 10_000), st.floats(0.3, 2.0))
def test_compiled_draws_are_those_of_the_noise(seed: int, temperature: float) -> None:
    lm = ToyLM(5, seed=seed % 7, zeros=0.3)
    drafter = knowing(lm, depth=2, shape=positions(parse("0 00 1 01 000 2 10 3 4 40")))
    drafter.begin(0, history(CONTEXT, 5, temperature))
    noise = StreamNoise(seed, seed % 3, DRAFT, seed % 50, 0)
    (tree,) = drafter.propose([0], [Budget(8, 3)], [noise])
    window = np.array([-1, -1, *CONTEXT])
    reader = drafter._seats[0].reader
    reference = fill_by_noise(drafter._table, drafter._odds, reader, window, drafter.shape, Budget(8, 3), noise)
    slow = drafter._sampled_tree(reference)
    assert tree.tokens.tolist() == slow.tokens.tolist() and tree.parents.tolist() == slow.parents.tolist()
    np.testing.assert_array_equal(tree.weights, slow.weights)
    for draws, slow_draws in zip(tree.draws, slow.draws, strict=True):
        for a, b in zip(draws, slow_draws, strict=True):
            assert (a.token, a.child) == (b.token, b.child)
            assert a.row.ids.tolist() == b.row.ids.tolist() and a.row.probs.tolist() == b.row.probs.tolist()
            assert a.row.prob(a.token) > 0 and a.row.probs.sum() == pytest.approx(1.0)
    assert all(tree.law(n) in (Law.WITHOUT_REPLACEMENT, Law.IID, Law.NONE) for n in range(len(tree)))


# exactness

WRONG = {
    "wide and deep": ("0 1 00", Budget(3, 2)),
    "two levels": ("0 1 00 10", Budget(4, 2)),
    "chain": ("0 00 000", Budget(3, 3)),
    "passed over": ("0 1 2 00 20", Budget(3, 2)),
}


def one_step_gap(shape: str, case: Case, verifier, temperature: float = 1.0, **options) -> float:
    """The distribution of a step whose table is full of another model's rows."""
    paths, budget = WRONG[shape]
    drafter = knowing(case.draft, depth=2, shape=positions(parse(paths)), **options)
    drafter.begin(0, history(CONTEXT, case.draft.vocab, temperature))
    emitted, count = step_distribution(
        verifier, lambda branch: drafter.propose([0], [budget], [branch.noise("draft")])[0], case.target
    )
    assert count > 1 or case.target.greedy
    return distance(emitted, case.target, budget.depth + 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("shape", WRONG)
def test_wrong_tables_give_the_targets_distribution(shape: str, case: Case) -> None:
    assert one_step_gap(shape, case, Recursive()) <= TOLERANCE


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.5])
def test_other_temperatures_and_rules_are_exact_too(temperature: float) -> None:
    assert one_step_gap("two levels", CASES[0], Recursive(), temperature) <= TOLERANCE
    assert one_step_gap("two levels", CASES[0], Traversal(), temperature) <= TOLERANCE
    assert one_step_gap("two levels", CASES[0], Recursive(), temperature, sampled=False) <= TOLERANCE


@pytest.mark.parametrize(
    ("rule", "sampled"), [(Recursive(), True), (Invariant(), False)], ids=["recursive", "invariant"]
)
def test_text_of_several_steps_has_the_targets_distribution_while_the_table_learns(rule, sampled: bool) -> None:
    make = lambda: stand(3, sampled=sampled, shape=positions(parse("0 1")), shortest=1)  # noqa: E731
    assert distribution_gap(make, rule, Budget(2, 1), ToyLM(3, seed=11), limit=200_000) < 1e-6


def test_rows_that_are_not_reduced_after_a_draw_are_seen(monkeypatch) -> None:
    original = ngram_distributions.rows

    def unreduced(filled):
        ids, probs, lengths = (part.copy() for part in original(filled))
        for node in range(1, len(lengths)):
            size = filled.sizes[filled.parents[node]]
            ids[node], probs[node], lengths[node] = (
                filled.ids[filled.parents[node]],
                filled.probs[filled.parents[node]],
                size,
            )
        return ids, probs, lengths

    monkeypatch.setattr(ngram_distributions, "rows", unreduced)
    assert one_step_gap("wide and deep", CASES[0], Recursive()) > 1e-3


# what it is for


def accepted(engine: Engine, sample: int, **params) -> float:
    settings = SamplingParams(max_new_tokens=24, temperature=1.0, seed=sample, **params)
    stats = engine.submit([0, 1], settings).result().stats
    return stats.new_tokens / stats.steps


def test_accepted_length_grows_with_the_trajectories_before() -> None:
    """Mean over 50 seeds of a repetitive source; fixed seeds, so the outcome is too."""
    curve = np.zeros(6)
    for seed in range(50):
        lm = ToyLM(12, seed=seed, order=2, concentration=0.1)
        drafter = stand(12, shape=positions(parse("0 00 000 1")))
        engine = Engine(ToyTarget(lm), Recipe("toy", drafter, Recursive(), Fixed(Budget(4, 3))), strict=True)
        curve += [accepted(engine, sample) / 50 for sample in range(6)]
    assert (np.diff(curve) > -0.1).all()
    assert curve[5] > curve[0] + 0.5


def test_where_the_table_is_right_every_draw_is_accepted_and_the_likeliest_token_is_not() -> None:
    lm = ToyLM(4, seed=4, order=2)
    right = [
        knowing(lm, depth=2, longest=2, sampled=sampled, shape=positions(parse("0 00 000")))
        for sampled in (True, False)
    ]
    engines = [
        Engine(ToyTarget(lm), Recipe("toy", drafter, Recursive(), Fixed(Budget(3, 3))), strict=True)
        for drafter in right
    ]
    drawn, likeliest = (np.mean([accepted(engine, sample) for sample in range(10)]) for engine in engines)
    assert drawn == 4.0
    assert likeliest < 3.5


# shape


def test_the_default_shape_has_eighty_places() -> None:
    shape = positions(parse(DEFAULT_SHAPE))
    assert len(shape) == 80 and (shape.ranks < 10).all()
    assert written(parse(DEFAULT_SHAPE)).split() == DEFAULT_SHAPE.split()
    assert len(set(DEFAULT_SHAPE.split())) == 80


def test_a_place_that_cannot_be_filled_leaves_its_node_to_the_next() -> None:
    drafter = stand(shape=positions(parse("0 00 1 2")), candidates=3)
    drafter.begin(0, past := history([6, 7], V))
    step(drafter, 0, past, np.log(np.linspace(1, 2, V)), 5)
    drafter.begin(0, history([6, 7], V))
    (tree,) = drafter.propose([0], [Budget(3, 3)], [None])
    assert spelled(tree) == {(7,), (6,), (5,)}  # nothing is known below 7
