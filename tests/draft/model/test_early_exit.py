"""DEL chooses by what it saw, only of rows whose prefix is the text; whatever it chooses, the text is the target's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.proposals import Proposals
from outrider.core.records import Budget, Chunk, Scores, StepRecord, Verdict
from outrider.core.tree import chain, root
from outrider.draft.model.early_exit import DynamicExit, Rates, Sureness, best_exit
from outrider.models import load_model
from tests.train.conftest import make_target

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
def test_expected_tokens_a_layer_equal_a_simulation(rate: float) -> None:
    noise = np.random.default_rng(0)
    length, layers, exit_ = 5, 12.0, 3.0
    runs = np.cumprod(noise.random((40_000, length)) < rate, axis=1).sum(1) + 1
    tokens = (1 - rate ** (length + 1)) / (1 - rate)
    assert runs.mean() == pytest.approx(tokens, rel=0.02)
    best = best_exit(np.array([rate]), np.array([exit_]), layers, 12)[1]
    values = [(1 - rate ** (d + 1)) / (1 - rate) / (d * exit_ + layers) for d in range(13)]
    assert best == int(np.argmax(values))


def test_the_choice_weighs_acceptance_against_layers_and_may_be_not_to_draft() -> None:
    costs = np.array([1.0, 4.0, 8.0])
    assert best_exit(np.array([0.01, 0.01, 0.01]), costs, 12.0, 10)[1] == 0
    assert best_exit(np.array([0.1, 0.9, 0.95]), costs, 32.0, 10)[0] == 1
    assert best_exit(np.array([0.85, 0.9, 0.95]), costs, 32.0, 10)[0] == 0
    lengths = [best_exit(np.array([a]), np.array([2.0]), 32.0, 18)[1] for a in (0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert best_exit(np.array([0.99]), np.array([1.0]), 32.0, 7) == (0, 7)


def test_older_rows_count_less_and_rates_stay_off_the_edges() -> None:
    rates = Rates(np.zeros(2))
    assert rates.acceptance.tolist() == [0.5, 0.5]
    rates.see(np.array([[True] * 200, [False] * 200]))
    high, low = rates.acceptance
    assert 0.95 < high <= 0.99 and 0.01 <= low < 0.05
    rates.see(np.array([[False] * 40, [True] * 40]))
    assert rates.acceptance[0] < 0.3 and rates.acceptance[1] > 0.7
    sure = Sureness()
    sure.see(np.array([True] * 50 + [False] * 50), np.array([0.8] * 50 + [0.2] * 50))
    assert 0.35 < sure.between < 0.65


class Fake:
    """A drafter that says one token, and notes what it is told."""

    name, shared_noise, needs = "fake", False, None

    def __init__(self) -> None:
        self.seen: list = []
        self.open: set[int] = set()

    def begin(self, slot, context) -> None:
        self.open.add(slot)

    def end(self, slot) -> None:
        self.open.remove(slot)

    def propose(self, slots, budgets, noise):
        self.seen.append([(slot, budget.nodes) for slot, budget in zip(slots, budgets, strict=True)])
        return Proposals([chain(7, [1] * budget.nodes) for budget in budgets])

    def observe(self, slots, records) -> None:
        self.seen += [record.tree.candidates for record in records]


def states(*said: list[int]) -> Scores:
    """Layer by layer, states whose reading is these tokens."""
    return Scores(None, {layer: torch.tensor(ids).float()[:, None] for layer, ids in zip((2, 4), said, strict=True)})


def read(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return states[:, 0].long(), torch.full((len(states),), 0.7)


def test_only_rows_up_to_the_first_wrong_token_are_counted() -> None:
    exits = {2: Fake(), 4: Fake()}
    drafter = DynamicExit(exits, read, layers=16)
    drafter.begin(0, SimpleNamespace(tokens=np.array([3, 7])))
    # Five nodes, two accepted: rows 0, 1, 2 have the text as their prefix, rows 3 and 4 do not.
    tree = chain(7, [1, 5, 6, 9])
    record = StepRecord(tree, Verdict((1, 2), 8), (1, 5, 8), states([1, 5, 0, 0, 0], [1, 5, 8, 0, 0]))
    drafter.observe([0], [record])
    rates = drafter._seats[0].rates
    fade = np.array([0.95**2, 0.95, 1.0])
    assert rates.rows == pytest.approx(fade.sum())
    assert rates.hits.tolist() == pytest.approx([fade[:2].sum(), fade.sum()])


def test_the_prompt_gives_first_rates_and_exits_begin_when_they_are_used() -> None:
    exits = {2: Fake(), 4: Fake()}
    drafter = DynamicExit(exits, read, layers=40)
    context = SimpleNamespace(tokens=np.array([3, 4, 5, 6, 7]))
    known = Chunk(0, 0, [3, 4, 5, 6], states([4, 5, 6, 0], [0, 0, 0, 0]))
    drafter.begin(0, context)
    drafter.begin(1, context)
    drafter.absorb([known, Chunk(1, 0, [9, 9], states([0, 0], [0, 0]))])
    assert drafter._seats[0].rates.acceptance[0] > 0.8 > 0.2 > drafter._seats[0].rates.acceptance[1]
    (tree,) = drafter.propose([0], [Budget(9, 9)], [None])
    assert tree.candidates > 0 and exits[2].open == {0} and exits[4].open == set()
    record = StepRecord(tree, Verdict((), 2), (2,), states([0], [2]))
    for _ in range(60):  # now the deeper exit is right and the other is not
        drafter.observe([0], [record])
    drafter.propose([0], [Budget(9, 9)], [None])
    assert exits[4].open == {0}
    told = len(exits[2].seen)
    drafter.observe([0], [record])
    assert exits[2].seen[told:] == [0]  # it did not draft: it is told of the tokens alone
    drafter.end(0)
    assert not exits[2].open and not exits[4].open


def test_without_anything_to_gain_it_does_not_draft() -> None:
    drafter = DynamicExit({2: Fake(), 4: Fake()}, read, layers=5)
    drafter.begin(0, SimpleNamespace(tokens=np.array([3, 7])))
    record = StepRecord(root(7), Verdict((), 2), (2,), states([0], [0]))
    for _ in range(80):
        drafter.observe([0], [record])
    assert drafter.propose([0], [Budget(9, 9)], [None])[0].candidates == 0


@pytest.fixture(scope="module")
def shallow():
    """Four layers of which the last two add nothing: an exit after two layers is exact."""
    made = make_target(3)
    with torch.no_grad():
        for layer in made.model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return load_model(made.model)


def run(loaded, method: str, options: dict, **sampling) -> list:
    engine = Outrider(loaded, method, options, strict=True)
    return engine.generate(PROMPTS, max_new_tokens=30, **sampling)


@pytest.mark.parametrize("method", ["del", "early-exit"])
def test_texts_are_the_targets(shallow, four_layers_target, method: str) -> None:
    for loaded in (shallow, four_layers_target):
        for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
            options = {"verifier": "invariant"}
            drafted = run(loaded, method, options, **sampling)
            assert [g.token_ids for g in drafted] == [g.token_ids for g in run(loaded, "plain", {}, **sampling)]
        results = run(loaded, method, {}, temperature=1.0, seed=2)
        assert all(g.stats.new_tokens == len(g.token_ids) for g in results)


@pytest.fixture(scope="module")
def four_layers_target():
    return make_target(0)


def test_it_finds_the_exit_that_is_exact(shallow) -> None:
    engine = Outrider(shallow, "del", {"exits": "1,2,3"}, strict=True)
    engine.generate(PROMPTS, max_new_tokens=30, temperature=0.0)
    drafter = engine.recipe("del").drafter
    results = engine.generate([PROMPTS[3]], max_new_tokens=40, temperature=0.0)
    assert results[0].stats.mean_accepted > 2.0
    assert drafter.layers == (1, 2, 3) and len(drafter._seats) == 0


def test_exits_follow_a_sequence_they_did_not_draft_for(four_layers_target, monkeypatch) -> None:
    """Exits used in turn: each catches up with what the others wrote, or its cache would be of another text."""
    from outrider.draft.model import early_exit
    from tests.watched import Watched

    turns = iter(range(10_000))

    def in_turn(rates, costs, whole, longest):
        turn = next(turns)
        return turn % 3, min(1 + turn % 3, longest)

    monkeypatch.setattr(early_exit, "best_exit", in_turn)
    engine = Outrider(four_layers_target, "del", {"exits": "1,2,3"}, strict=True)
    drafter = engine.recipe("del").drafter
    for drafter_of_exit in drafter.exits:
        drafter_of_exit.source = Watched(drafter_of_exit.source.target, drafter_of_exit.source.width, "del")
    plain = Outrider(four_layers_target, "plain").generate([PROMPTS[0]], max_new_tokens=40)
    assert engine.generate([PROMPTS[0]], max_new_tokens=40)[0].token_ids == plain[0].token_ids
    assert Watched.steps > 20


def test_wrong_options_are_refused(four_layers_target) -> None:
    with pytest.raises(InputError, match="option exits"):
        Outrider(four_layers_target, "del", {"exits": "2,9"})
    with pytest.raises(InputError, match="option layers"):
        Outrider(four_layers_target, "early-exit", {"layers": 4})
