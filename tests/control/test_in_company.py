"""Many sequences kept running under a simulated clock: what drafting takes for each of them, and for all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from outrider.check.toy import ToyTarget
from outrider.control.cost_model import CostModel
from outrider.control.draft_depth import DraftDepth
from outrider.control.fixed import Fixed
from outrider.control.goodput import Goodput
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.proposals import Proposals
from outrider.core.protocols import Noise, Part, Recipe
from outrider.core.records import Budget, Needs, Piece, Role, Scores, StepRecord
from outrider.draft.mix import Mix
from outrider.verify.invariant import Invariant
from tests.control.test_never_slower import LM, Clock, Guesses

Right = Callable[[int], float]


class Timed(ToyTarget):
    """A pass takes its time by all of its rows, those of prompts among them, and by sequences."""

    def __init__(self, clock: Clock, row: float, slots: int) -> None:
        super().__init__(LM, slots, max_context=512, prompt_rows=40)
        self.clock, self.row = clock, row

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        rows = sum(len(piece.tokens) if piece.tree is None else len(piece.tree) for piece in pieces)
        self.clock.now += cost(rows, self.row) + 0.003 * len(pieces)
        return super().run(pieces, needs)


def cost(rows: int, row: float) -> float:
    return 1.0 + row * rows


@dataclass
class InCompany(Guesses):
    """Takes time for each sequence besides, whether it finds anything or not."""

    each: float = 0.0
    asked: int = 0  # times

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        self.asked += 1
        self.clock.now += self.each * len(slots)
        return super().propose(slots, budgets, noise)

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.clock.now += self.each / 2 * len(slots)


def company(batch: int, row: float, copies: Right | None, network: Right, new: int = 96, prompt: int = 12):
    """Seconds that twice so many requests take, and the network; without `copies` it is plain decoding."""
    clock = Clock()
    copying = InCompany(copies or network, clock, each=0.006)
    running = InCompany(network, clock, call=0.06, level=0.035, width=2, each=0.004)
    parts = [Part(copying, Role.FREE), Part(running, Role.RUNS)]
    costs = CostModel(lambda rows: cost(rows, row))
    control = Goodput(Budget(32, 16), [part.role for part in parts], costs, even=True)
    recipe = Recipe("mix", Mix(parts, control, clock), Invariant(), control, costs=costs)
    if copies is None:
        recipe = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    engine = Engine(Timed(clock, row, batch), recipe, strict=True, clock=clock)
    rng = np.random.default_rng(5)
    for _ in range(2 * batch):
        engine.submit(rng.integers(0, 5, prompt).tolist(), SamplingParams(max_new_tokens=new, ignore_eos=True))
    while engine.step():
        pass
    return clock.now, running.asked, engine.steps


@pytest.mark.parametrize("right", [0.0, 0.15])
@pytest.mark.parametrize(("batch", "row"), [(4, 0.004), (12, 0.004), (8, 0.12)])  # a GPU, and a processor
def test_where_nothing_pays_a_batch_is_hardly_slower_than_plain_decoding(batch: int, row: float, right: float) -> None:
    plain, *_ = company(batch, row, None, lambda _: 0.0, new=240)
    mixed, *_ = company(batch, row, lambda at: 0.9 if at % 100 < 3 else 0.0, lambda _: right, new=240)
    assert plain / mixed > 0.95


def test_where_it_pays_a_batch_is_much_faster() -> None:
    plain, *_ = company(8, 0.004, None, lambda _: 0.0)
    mixed, *_ = company(8, 0.004, lambda at: 0.9 if at % 100 < 20 else 0.0, lambda _: 0.75)
    assert plain / mixed > 1.6


def test_prompts_beside_nearly_every_step_do_not_hide_what_does_not_pay() -> None:
    """Answers of a few tokens: hardly a step is without a prompt."""
    plain, *_ = company(8, 0.12, None, lambda _: 0.0, new=14, prompt=30)
    mixed, *_ = company(8, 0.12, lambda _: 0.1, lambda _: 0.1, new=14, prompt=30)
    assert plain / mixed > 0.93


def test_a_network_that_is_never_right_is_tried_no_more_often_in_company() -> None:
    """By steps, not by sequences."""
    shares = []
    for batch in (1, 8):
        _, asked, steps = company(batch, 0.004, lambda at: 0.6, lambda _: 0.0, new=400)
        shares.append(asked / steps)
    assert shares[1] <= 1.5 * shares[0], shares


def taught(gains: dict[float, float]) -> DraftDepth:
    """By what the others expect: how many times as fast a step is with the network, asked 4 deep."""
    choice = DraftDepth(4, trials=1)
    choice.time(4, 0.1)
    for cheap, gain in gains.items():
        for _ in range(3):
            choice.learn(cheap, np.array([1.0, 1.0, 1.0, 1.0, gain]))
    return choice


def test_a_network_runs_for_the_whole_batch_or_not_at_all() -> None:
    choice = taught({0.0: 1.4, 2.0: 0.7})
    assert choice.depth(0.0, 4) == 4 and choice.depth(2.0, 4) == 0
    assert choice.depth_together([0.0, 0.0, 2.0], 4) == 4
    assert choice.depth_together([0.0, 2.0, 2.0], 4) == 0  # what one gains all others would pay


def test_a_step_of_many_sequences_counts_once() -> None:
    choice = taught({0.0: 0.5})
    patience = choice._kinds[0].patience
    choice.learn_together([0.0] * 8, [np.array([1.0, 1.0, 1.0, 1.0, 0.5])] * 8)
    assert choice._kinds[0].patience <= 2 * patience and choice._kinds[0].seen == 4
    choice.pass_by(*[0.0] * 8)
    assert choice._kinds[0].idle == 1
