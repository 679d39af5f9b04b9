"""Active experts in the cost model: what an expert costs is measured, how many a step touches is learnt from passes,
and the default policy then drafts less where a text's candidates choose different experts, and is faster for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from outrider.check.toy import ToyTarget
from outrider.control.cost import CostCurve, measure, stored
from outrider.control.cost_model import ENOUGH, CostModel
from outrider.control.experts import ExpertCosts, ExpertUse
from outrider.control.goodput import Goodput
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.protocols import Part, Recipe
from outrider.core.records import Budget, Needs, Piece, Role, Scores, Traits
from outrider.draft.mix import Mix
from outrider.verify.invariant import Invariant
from tests.control.test_never_slower import LM, TOKENS, Clock, Guesses

EXPERTS, CHOSEN = 64, 4
MANY, FEW = 64, 6  # experts among which the rows of a stretch of text choose
STRETCH = 128  # tokens


class Mixture(ToyTarget):
    """A step reads the experts that its rows have chosen, each by its path, among many in some stretches of text."""

    def __init__(self, clock: Clock, among: int | None = None) -> None:
        """`among` so many experts rows choose; None: among many and among few in turns."""
        super().__init__(LM, 1, max_context=2 * TOKENS)
        self.clock, self.among, self.touched = clock, among, 0
        self.sizes: dict[int, list[int]] = {MANY: [], FEW: []}  # rows of steps, by among how many they chose

    @property
    def traits(self) -> Traits:
        return replace(super().traits, experts=float(EXPERTS), active_experts=lambda: float(self.touched))

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        (piece,) = pieces
        if piece.tree is not None:
            among = self.among or (FEW if self.length(piece.slot) // STRETCH % 2 else MANY)
            paths = [tuple(piece.tree.path_tokens(node)) for node in range(len(piece.tree))]
            self.touched = len({expert for path in paths for expert in choice(path, among)})
            self.sizes[among].append(len(piece.tree))
            self.clock.now += 0.4 + 0.01 * len(piece.tree) + 0.05 * self.touched
        return super().run(pieces, needs)


@cache
def choice(path: tuple[int, ...], among: int) -> list[int]:
    rng = np.random.default_rng([len(path), *path])
    return rng.choice(among, CHOSEN, replace=False).tolist()


def test_what_an_expert_costs_is_told_from_what_a_row_costs() -> None:
    clock = Clock()
    curve = measure(Mixture(clock, MANY), repeats=1, clock=clock)
    assert curve.experts is not None
    assert curve.experts.seconds > 0 and curve.experts.total == EXPERTS and curve.experts.touched[0] == CHOSEN
    few, many = (curve.seconds(8) - 0.05 * curve.experts.touched[curve.rows.index(8)] for _ in range(2))
    assert few == many == pytest.approx(0.4 + 0.08)
    costs = ExpertCosts.of(64.0, (1, 8), (4.0, 24.0), {8: (8.0, 0.88)}, (0.61, 1.68))
    assert costs.seconds == pytest.approx(0.05)
    assert ExpertCosts.of(64.0, (1, 8), (4.0, 24.0), {8: (24.0, 0.5)}, (0.6, 1.7)).seconds == 0.0


def test_a_model_without_experts_is_measured_without_and_the_curve_is_read_back(tmp_path) -> None:
    assert measure(ToyTarget(LM), (1, 2), contexts=(8,), repeats=1).experts is None
    clock = Clock()
    sizes = {"rows": (1, 8), "contexts": (8,), "repeats": 1, "clock": clock}
    first = stored(Mixture(clock, MANY), "m", "eager", tmp_path, **sizes)
    assert first.experts is not None
    assert stored(Mixture(clock, MANY), "m", "eager", tmp_path, **sizes) == first


def use(touched: list[float]) -> ExpertUse:
    costs = ExpertCosts(64.0, (1, 64), (4.0, 64.0), 0.05)
    return ExpertUse(lambda: touched[-1], costs)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_one_size_of_step_tells_how_many_experts_any_other_touches(spread: float) -> None:
    rows = np.arange(1, 33)
    truth = 64 * (1 - (1 - 4 / 64) ** (rows.astype(float) ** spread))
    seen: list[float] = [truth[7]]
    experts = use(seen)
    experts.see(1, 8)
    assert experts.touched(1, rows) == pytest.approx(truth)
    assert experts.touched(2, rows) == pytest.approx(np.interp(rows, (1, 64), (4, 64))), "nothing is known of two"


def test_a_text_whose_rows_begin_to_choose_apart_makes_sizes_that_did_not_run_since_more_expensive() -> None:
    touched = [4.0]
    costs = CostModel(lambda rows: 0.6 + 0.01 * rows, experts=use(touched))
    for _ in range(ENOUGH):
        costs.add(4, 1, 0.44 + 0.2)
    alike = costs.seconds(1, 31)[31]
    touched.append(64 * (1 - (1 - 4 / 64) ** 4))
    for _ in range(ENOUGH):
        costs.add(4, 1, 0.44 + 0.05 * touched[-1])
    apart = costs.seconds(1, 31)[31]
    assert apart > alike + 0.5


def guesses(clock: Clock) -> Guesses:
    return Guesses(lambda _: 0.85, clock)


def generate(told: bool, among: int | None) -> tuple[float, dict[int, float]]:
    """Seconds for the text, and the mean rows of its steps, by a cost model that knows of experts or one that does not.

    Both have the curve that was measured on the target, and learn from every step.
    """
    clock = Clock()
    target = Mixture(clock, among)
    curve: CostCurve = measure(target, repeats=1, clock=clock)
    assert curve.experts is not None
    experts = ExpertUse(lambda: float(target.touched), curve.experts) if told else None
    costs = CostModel(curve.seconds, experts=experts)
    part = Part(guesses(clock), Role.FREE)
    control = Goodput(Budget(48, 16), [part.role], costs, even=True)
    recipe = Recipe("mix", Mix([part], control, clock), Invariant(), control, costs=costs)
    engine = Engine(target, recipe, strict=True, clock=clock)
    target.sizes = {MANY: [], FEW: []}
    begun = clock.now
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=TOKENS))
    while engine.step():
        pass
    return clock.now - begun, {among: float(np.mean(rows)) for among, rows in target.sizes.items() if rows}


def test_told_of_experts_it_drafts_less_where_rows_choose_among_many_and_is_faster() -> None:
    blind, blind_sizes = generate(told=False, among=None)
    told, told_sizes = generate(told=True, among=None)
    assert told_sizes[MANY] < 0.9 * blind_sizes[MANY] and told_sizes[FEW] > 1.5 * blind_sizes[FEW]
    assert told < 0.95 * blind


@pytest.mark.parametrize("among", [MANY, FEW])
def test_in_a_text_of_one_kind_it_is_faster_or_hardly_slower_for_knowing(among: int) -> None:
    blind, _ = generate(told=False, among=among)
    told, _ = generate(told=True, among=among)
    assert told <= (0.95 if among == MANY else 1.03) * blind
