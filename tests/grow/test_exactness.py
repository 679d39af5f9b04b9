"""Every outcome of growing and verifying on toy models: what is emitted is distributed as the target says.

Each planted bug is one that the papers' code or a hasty grower makes; the same comparison must see it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from outrider.check.exhaustive import (
    CASES,
    TOLERANCE,
    Case,
    Trees,
    distance,
    grown_distribution,
    grown_trees,
    verified,
)
from outrider.check.toy import ToyLM
from outrider.core.records import Budget
from outrider.grow import drawing, dyspec, kary, rsd, sequoia
from outrider.grow.chain import Chain
from outrider.grow.dyspec import Calibration, Heap, Threshold
from outrider.grow.kary import KAry
from outrider.grow.rsd import ConstantBranching, StochasticBeam
from outrider.grow.sequoia import Sequoia
from outrider.grow.top_plus_one import TopPlusOne
from outrider.grow.topk import TopK
from outrider.verify.recursive import Recursive
from outrider.verify.traversal import Traversal


def hopeful() -> Calibration:
    """What is seen where drafts are accepted more often than they are likely."""
    calibration = Calibration()
    calibration._drawn[0], calibration._drawn[1] = 100.0, 80.0
    calibration._asked[0], calibration._asked[1] = (
        100.0,
        np.linspace(90.0, 10.0, calibration._asked[1].size).reshape(calibration._asked[1].shape),
    )
    return calibration


GROWERS = {
    "chain": (Chain, Budget(3, 3)),
    "k-ary iid (2, 1)": (lambda: KAry((2, 1), "iid"), Budget(4, 2)),
    "k-ary iid (2, 2), cut": (lambda: KAry((2, 2), "iid"), Budget(3, 2)),
    "k-ary without replacement (2, 2)": (lambda: KAry((2, 2), "without-replacement"), Budget(6, 2)),
    "k-ary top": (lambda: KAry((2, 2), "top"), Budget(6, 2)),
    "rsd-c (3, 1)": (lambda: ConstantBranching((3, 1)), Budget(6, 2)),
    "rsd-s 2 x 2": (lambda: StochasticBeam(2, 2), Budget(4, 2)),
    "rsd-s 2 x 3, cut": (lambda: StochasticBeam(2, 3), Budget(5, 3)),
    "dyspec heap 4": (Heap, Budget(4, 3)),
    "dyspec heap 5": (Heap, Budget(5, 2)),
    "dyspec threshold": (lambda: Threshold(threshold=0.2), Budget(20, 2)),
    "dyspec threshold, cut": (Threshold, Budget(4, 3)),
    "dyspec heap, calibrated": (lambda: Heap(calibration=hopeful()), Budget(4, 3)),
    "dyspec threshold, calibrated": (lambda: Threshold(calibration=hopeful()), Budget(4, 3)),
    "sequoia 4": (Sequoia, Budget(4, 3)),
    "top plus one": (lambda: TopPlusOne((2, 2)), Budget(6, 2)),
    "top-k": (lambda: TopK(beam=2, branch=2), Budget(5, 3)),
}
LENGTH = 4
GENERIC = CASES[0]


@lru_cache(maxsize=8)
def trees(grower: str, draft: ToyLM) -> Trees:
    """What a grower makes of a source does not hang on the target, which is most of what a case is."""
    make, budget = GROWERS[grower]
    return grown_trees(make, budget, draft)


def gap(grower: str, case: Case = GENERIC, verifier=None, shared: bool = False) -> float:
    """`shared`: trees that another test may have grown."""
    grown = trees(grower, case.draft) if shared else grown_trees(*GROWERS[grower], case.draft)
    probs, count = verified(verifier or Recursive(), grown, case.target)
    assert count > 1 or case.target.greedy
    assert sum(probs.values()) == pytest.approx(1.0)
    return distance(probs, case.target, LENGTH)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("grower", GROWERS)
def test_grown_trees_give_the_targets_distribution(grower: str, case: Case) -> None:
    assert gap(grower, case, shared=True) <= TOLERANCE


@pytest.mark.parametrize("grower", [name for name in GROWERS if "chain" not in name])
def test_traversal_from_the_leaves_is_exact_on_trees_whose_form_depends_on_the_draws(grower: str) -> None:
    assert gap(grower, verifier=Traversal()) <= TOLERANCE


def test_a_wider_beam_over_four_tokens_is_exact() -> None:
    case = replace(GENERIC, target=ToyLM(4, seed=1), draft=ToyLM(4, seed=11))
    probs, count = grown_distribution(Recursive(), lambda: StochasticBeam(3, 2), Budget(6, 2), case, limit=60_000)
    assert count > 1000
    assert distance(probs, case.target, 3) <= TOLERANCE


@pytest.mark.parametrize("grower", ["k-ary without replacement (2, 2)", "rsd-c (3, 1)", "sequoia 4"])
def test_rows_that_are_not_reduced_after_a_draw_are_seen(grower: str, monkeypatch) -> None:
    def unreduced(q, count, noise, node):
        return [(token, q) for token, _ in drawing.without_replacement(q, count, noise, node)]

    monkeypatch.setattr(rsd, "without_replacement", unreduced)
    monkeypatch.setattr(sequoia, "without_replacement", unreduced)
    monkeypatch.setitem(kary.DRAWINGS, "without-replacement", unreduced)
    assert gap(grower) > 1e-3


def test_rows_that_are_not_reduced_are_seen_in_the_beam(monkeypatch) -> None:
    monkeypatch.setattr(rsd, "reduced", lambda row, drawn: [(int(row.ids[i]), row) for i in drawn])
    assert gap("rsd-s 2 x 2") > 1e-3


def test_a_beam_whose_siblings_are_sorted_by_probability_is_seen(monkeypatch) -> None:
    def by_probability(row, drawn):
        return drawing.reduced(row, sorted(drawn, key=lambda i: -row.probs[i]))

    monkeypatch.setattr(rsd, "reduced", by_probability)
    assert gap("rsd-s 2 x 2") > 1e-3


def test_a_beam_that_looks_at_the_child_before_keeping_it_is_seen(monkeypatch) -> None:
    """An ordinary beam over sampled children: the improbable ones are dropped because of what they are."""
    original = rsd._Beam.expand

    def expand(self, nodes, rows):
        wanted = original(self, nodes, rows)
        growth = self.growth
        for node in nodes:
            growth.draws[node] = tuple(d for d in growth.draws[node] if d.row is None or d.row.prob(d.token) > 0.25)
        return wanted

    monkeypatch.setattr(rsd._Beam, "expand", expand)
    assert gap("rsd-s 2 x 2") > 1e-3


@pytest.mark.parametrize("grower", ["dyspec heap 4", "dyspec threshold"])
def test_dropping_a_drawn_token_for_its_low_value_is_seen(grower: str, monkeypatch) -> None:
    """The decision to draw must come before the draw."""
    original = dyspec._Positions.tree

    def tree(self, origin):
        grown = original(self, origin)
        draws = tuple(tuple(d for d in made if d.row is None or d.row.prob(d.token) > 0.25) for made in grown.draws)
        return replace(grown, draws=draws)

    monkeypatch.setattr(dyspec._Positions, "tree", tree)
    assert gap(grower) > 1e-3


def test_taking_the_likeliest_and_calling_it_a_draw_is_seen() -> None:
    class Favourite:
        def draw(self, weights, node, draw):
            return int(weights.argmax())

    class Wrong(Heap):
        def grow(self, source, slots, pending, budgets, noise):
            return super().grow(source, slots, pending, budgets, [Favourite()] * len(slots))

    probs, _ = grown_distribution(Recursive(), Wrong, Budget(4, 3), GENERIC)
    assert distance(probs, GENERIC.target, LENGTH) > 1e-3


def test_top_tokens_chosen_with_knowledge_of_the_sampled_one_are_seen(monkeypatch) -> None:
    """Drawing from the whole row first and calling the rest of the top points: the row is not what was drawn from."""

    def wrong(q, count, noise, node):
        index = noise.draw(q.probs, node, 0)
        order = [i for i in drawing.ranked(q) if i != index][: count - 1]
        rest = np.ones(len(q.ids), dtype=bool)
        rest[order] = False
        row = drawing.proper(type(q)(q.ids[rest], q.probs[rest]))
        return [*((int(q.ids[i]), None) for i in order), (int(q.ids[index]), row)]

    monkeypatch.setattr("outrider.grow.top_plus_one.top_plus_one", wrong)
    assert gap("top plus one") > 1e-3
