"""The default policy in the real engine under a simulated clock: never slower than plain decoding for long, and near
the best fixed size where speculation pays, whatever steps cost and however often drafts are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.cost_model import CostModel
from outrider.control.fixed import Fixed
from outrider.control.goodput import Goodput
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.proposals import Proposals
from outrider.core.protocols import Context, Noise, Part, Recipe
from outrider.core.records import Budget, Chunk, Needs, Piece, Role, Scores, StepRecord
from outrider.core.tree import TokenTree, fixed
from outrider.draft.mix import Mix
from outrider.verify.invariant import Invariant

LM = ToyLM(vocab=5, seed=3, order=6, greedy=True)
TOKENS = 640
Cost = Callable[[int, int, float], float]  # by rows, sequences and time


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(ToyTarget):
    """Takes as long as its cost says."""

    def __init__(self, clock: Clock, cost: Cost, slots: int) -> None:
        super().__init__(LM, slots, max_context=2 * TOKENS)
        self.clock, self.cost = clock, cost

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        if trees := [piece.tree for piece in pieces if piece.tree is not None]:
            self.clock.now += self.cost(sum(map(len, trees)), len(trees), self.clock.now)
        return super().run(pieces, needs)


@dataclass
class Guesses:
    """Knows the target, and is right at each token as often as it is told; as sure as it is right."""

    right: Callable[[int], float]  # by the length of the text
    clock: Clock
    call: float = 0.0  # seconds of a proposal
    level: float = 0.0  # of each level
    reading: float = 0.0  # of each row that it reads
    width: int = 1
    name: str = "guesses"
    needs: Needs = field(default_factory=Needs)
    shared_noise: bool = False
    contexts: dict[int, Context] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def begin(self, slot: int, context: Context) -> None:
        self.contexts[slot] = context

    def absorb(self, chunks: Sequence[Chunk]) -> None: ...

    def end(self, slot: int) -> None:
        del self.contexts[slot]

    def observe(self, slots: Sequence[int], records: Sequence[StepRecord]) -> None:
        self.clock.now += self.reading * sum(len(record.tree) for record in records)

    def propose(self, slots: Sequence[int], budgets: Sequence[Budget], noise: Sequence[Noise]) -> Proposals:
        trees = [self.tree(self.contexts[slot], budget) for slot, budget in zip(slots, budgets, strict=True)]
        levels = max((tree.depth for tree in trees), default=0)
        self.clock.now += self.call + self.level * levels
        return Proposals(trees, levels)

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        """A chain of what it takes for the text, each with another token beside it if there is room."""
        text = context.tokens.tolist()
        chance = self.right(len(text))
        tokens, parents, weights, last = [text[-1]], [-1], [1.0], 0
        for depth in range(budget.depth):
            if len(tokens) + self.width > budget.nodes + 1 or weights[last] < budget.least:
                break
            likeliest = int(LM.probs(text).argmax())
            said = likeliest if self.rng.random() < chance else (likeliest + 1) % LM.vocab
            above, last = last, len(tokens)
            for i in range(self.width):
                tokens.append((said + i) % LM.vocab)
                parents.append(above)
                weights.append(chance ** (depth + 1) * 0.3**i)
            text.append(said)
        return fixed(np.array(tokens), np.array(parents), self.name, np.array(weights))


def flat(rows: int, batch: int, now: float) -> float:
    return 1.0 + 0.002 * (rows - batch)


def linear(rows: int, batch: int, now: float) -> float:
    return 1.0 + 0.15 * (rows - batch)


def padded(rows: int, batch: int, now: float) -> float:
    return 1.0 + 0.1 * (-(-rows // (8 * batch)) * 8 - 1)


def jumping(rows: int, batch: int, now: float) -> float:
    """The machine is now and then three times as slow, and rows cost then what they should not."""
    busy = int(now / 60) % 2
    return (1.0 + 0.05 * (rows - batch)) * (1 + 2 * busy) + 0.2 * busy * (rows > batch)


COSTS = {cost.__name__: cost for cost in (flat, linear, padded, jumping)}
Parts = Callable[[Clock], Sequence[tuple[Guesses, Role]]]


def run(cost: Cost, parts: Parts | None, size: int | None = None, batch: int = 1) -> list[float]:
    """The times at which each token of the first sequence was there; `size`: always so many candidates."""
    clock = Clock()
    target = Timed(clock, cost, batch)
    mixture = [Part(*part) for part in parts(clock)] if parts else []
    roles = [part.role for part in mixture]
    costs = CostModel(lambda rows: cost(rows, 1, 0.0)) if size is None else None
    control = Goodput(Budget(32 if size is None else size, 16), roles, costs, even=True)
    recipe = Recipe("mix", Mix(mixture, control, clock), Invariant(), control, costs=costs)
    if parts is None:
        recipe = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    engine = Engine(target, recipe, strict=True, clock=clock)
    times: list[float] = []
    for i in range(batch):
        told = (lambda _: times.append(clock.now)) if i == 0 else None
        engine.submit([1, 2, i % 5], SamplingParams(max_new_tokens=TOKENS), on_token=told)
    while engine.step():
        pass
    return times


@cache
def plain(name: str, batch: int) -> list[float]:
    return run(COSTS[name], None, batch=batch)


def slowest(times: Sequence[float], cost: Cost, batch: int, window: int, first: int = 0) -> float:
    """The smallest speed over that of plain decoding at the same time, over any so many tokens after the `first`."""
    ticks = np.arange(0.0, times[-1] + 1.0, 0.25)
    rates = [1.0 / cost(batch, batch, now) for now in ticks.tolist()]
    could = np.interp([0.0, *times], ticks, np.concatenate([[0.0], np.cumsum(rates)[:-1] * 0.25]))
    starts = range(first, len(times) - window + 1, 16)
    return min(window / (could[start + window] - could[start]) for start in starts)


def never(clock: Clock) -> list[tuple[Guesses, Role]]:
    """Nothing is ever right, and everybody is sure."""
    return [
        (Guesses(lambda _: 0.0, clock, call=0.002), Role.FREE),
        (Guesses(lambda _: 0.0, clock, call=0.01, reading=0.03, width=2), Role.LOOKS),
        (Guesses(lambda _: 0.0, clock, level=0.08), Role.RUNS),
    ]


def seldom(clock: Clock) -> list[tuple[Guesses, Role]]:
    """Right too seldom to pay for a network or for reading."""
    return [
        (Guesses(lambda at: 0.9 if at % 200 < 8 else 0.0, clock, call=0.002), Role.FREE),
        (Guesses(lambda _: 0.1, clock, call=0.01, reading=0.03, width=2), Role.LOOKS),
        (Guesses(lambda _: 0.2, clock, level=0.2), Role.RUNS),
    ]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("parts", [never, seldom], ids=lambda parts: parts.__name__)
def test_where_nothing_pays_it_is_hardly_slower_than_plain_decoding(parts: Parts, cost: str, batch: int) -> None:
    times = run(COSTS[cost], parts, batch=batch)
    assert slowest(times, COSTS[cost], batch, 512, first=64) >= 0.97
    assert slowest(times, COSTS[cost], batch, 128) >= 0.93


def good(clock: Clock) -> list[tuple[Guesses, Role]]:
    return [
        (Guesses(lambda at: 0.95 if at % 100 < 30 else 0.0, clock, call=0.002), Role.FREE),
        (Guesses(lambda _: 0.7, clock, level=0.05, width=2), Role.RUNS),
    ]


@pytest.mark.parametrize("cost", ["flat", "linear", "padded"])
def test_where_it_pays_it_is_near_the_best_fixed_size(cost: str) -> None:
    fixed_sizes = [run(COSTS[cost], good, size)[-1] for size in (1, 3, 7, 15, 31)]
    best = min([plain(cost, 1)[-1], *fixed_sizes])
    assert run(COSTS[cost], good)[-1] <= best / 0.95


def test_a_part_that_reads_rows_takes_part_where_that_pays() -> None:
    def reads(clock: Clock) -> list[tuple[Guesses, Role]]:
        return [(Guesses(lambda _: 0.8, clock, reading=0.01), Role.LOOKS)]

    assert plain("flat", 1)[-1] / run(flat, reads)[-1] > 2.5


def test_several_methods_in_one_batch_share_what_steps_cost_and_none_is_blamed_for_another() -> None:
    clock = Clock()
    costs = CostModel(lambda rows: linear(rows, 1, 0.0))
    engine = Engine(Timed(clock, linear, 3), Recipe("plain", None, Invariant(), Fixed(Budget(0, 0))), clock=clock)
    recipes = []
    for share in (0.9, 0.0):
        part = Part(Guesses(lambda _, right=share: right, clock, call=0.002), Role.FREE)
        control = Goodput(Budget(8, 8), [part.role], costs, even=True)
        recipes.append(Recipe("mix", Mix([part], control, clock), Invariant(), control, costs=costs))
    params = SamplingParams(max_new_tokens=200)
    good, bad, none = (engine.submit([1, 2], params, recipe) for recipe in (*recipes, None))
    while engine.step():
        pass
    assert good.result().stats.mean_accepted > 1.5
    assert bad.result().stats.drafted < 60 and none.result().stats.drafted == 0
    assert costs.seconds(3, 0)[0] == pytest.approx(linear(3, 3, 0.0), rel=0.05)
