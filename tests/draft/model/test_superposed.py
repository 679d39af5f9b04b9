"""Superposed decoding: the score is the paper's, mixtures are linear, and paths are as many as a chain's forwards."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.check import exhaustive, gate
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import NO_NEEDS, Budget, Piece
from outrider.core.rows import superposed as made
from outrider.core.rows.superposed import (
    Drafts,
    Start,
    Superposition,
    TextGrams,
    first,
    further,
    joined,
    said_by_grams,
    unroll,
)
from outrider.draft.grown import Grown
from outrider.draft.model.draft_model import ModelSource
from outrider.draft.model.superposed import Superposed, tree_of
from outrider.grow.chain import Chain
from outrider.models import load_model
from outrider.runtime.targets import eager_target, native_target
from outrider.verify.invariant import Invariant
from tests.watched import llama

PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
NO_GRAMS = TextGrams()
NO_ENDS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(1)


class Counted:
    """N-grams with given counts."""

    def __init__(self, counts: dict[tuple[int, ...], int]) -> None:
        self.counts = counts

    def count(self, query: NDArray[np.int64], /) -> int:
        return self.counts.get(tuple(query.tolist()), 0)


@pytest.mark.parametrize("make", [eager_target, native_target])
def test_one_draft_without_ngrams_is_greedy_decoding(model: Any, make: Any) -> None:
    target, how = make(model, max_slots=2), Superposition(drafts=1, alpha=0)
    slot, text = target.acquire(), [3, 1, 4, 1, 5]
    target.run([Piece(slot, text[:-1])], NO_NEEDS)
    start = Start(slot, text[-1:], text, NO_GRAMS, 8)
    *_, (drafts,) = unroll(target, [start], model.get_input_embeddings(), how, NO_ENDS)
    with torch.no_grad():
        for _ in range(8):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert drafts.paths == (tuple(text[5:]),)


def test_drafts_with_equal_last_tokens_read_that_tokens_embedding(model: Any) -> None:
    """Shares sum to 1, and mixing is linear."""
    embed, read = model.get_input_embeddings(), []
    drafts = Drafts(((1, 9), (2, 9), (3, 9)), np.array([-1.0, -4.0, -300.0]))
    assert drafts.weights.sum() == pytest.approx(1) and (drafts.weights > 0).all()
    read = torch.from_numpy(drafts.weights).float() @ embed(torch.tensor([path[-1] for path in drafts.paths]))
    torch.testing.assert_close(read, embed(torch.tensor(9)))


def slow(drafts: Drafts, logits: torch.Tensor, start: Start, how: Superposition) -> list[tuple[tuple[int, ...], float]]:
    """The formula, one pair after the other."""
    kept = logits.argsort(descending=True)[: how.tokens or how.drafts].tolist()
    f = torch.softmax(logits[kept].double() / how.temperature, 0).tolist()
    found = []
    for path, score in zip(drafts.paths, drafts.scores, strict=True):
        text, g = [*start.text, *path], []
        for token, chance in zip(kept, f, strict=True):
            total = how.floor * chance
            for n, weight in enumerate(how.orders, 2):
                if n - 1 <= len(text) and (seen := start.grams.count(np.array(text[-(n - 1) :]))):
                    total += weight * start.grams.count(np.array([*text[-(n - 1) :], token])) / seen
            g.append(total)
        for token, chance, total in zip(kept, f, g, strict=True):
            if not any(g):
                more = (1 - how.alpha) * np.log(chance) - how.penalty
            elif total:
                more = (1 - how.alpha) * np.log(chance) + how.alpha * np.log(total)
            else:
                continue
            found.append(((*path, token), float(score + more)))
    return sorted(found, key=lambda one: -one[1])[: how.drafts]


@pytest.mark.parametrize(("seed", "floor"), [*product(range(6), (0.0, 0.02))])
def test_scores_and_selection_equal_a_slow_oracle(seed: int, floor: float) -> None:
    make, grams = np.random.default_rng(seed), TextGrams()
    text = make.integers(0, 6, 40).tolist()
    grams.read(text)
    how = Superposition(drafts=3, tokens=4, temperature=0.5, floor=floor)
    drafts = Drafts(((1, 2), (3, 4), (0, 0)), np.array([-0.1, -0.5, -2.0]))
    start, logits = Start(0, [text[-1]], text, grams, 4), torch.from_numpy(make.standard_normal(6))
    found = further(drafts, logits, start, how, NO_ENDS)
    want = slow(drafts, logits, start, how)
    assert list(found.paths) == [path for path, _ in want]
    np.testing.assert_allclose(found.scores, [score for _, score in want])


def test_nothing_known_is_penalised_and_is_no_nan() -> None:
    chances, how = np.array([0.7, 0.3]), Superposition(floor=0.0)
    np.testing.assert_allclose(joined(chances, np.zeros(2), how), 0.46 * np.log(chances) - 200)
    assert joined(chances, np.array([0.5, 0.0]), how)[1] == -np.inf
    assert (said_by_grams(NO_GRAMS, [1, 2], np.array([3]), how.orders) == 0).all()


def test_ended_drafts_leave_as_many_that_go_on() -> None:
    how, start = Superposition(drafts=2, tokens=4, alpha=0), Start(0, [1], [1], NO_GRAMS, 4)
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    begun = first(logits, Superposition(drafts=3, alpha=0), frozenset({3}))
    assert begun.finished[0][0] == (3,) and begun.paths == ((2,), (1,))
    found = further(begun, logits, start, how, frozenset({3}))
    assert len(found.paths) == 2 and {path for path, _ in found.finished} >= {(3,), (2, 3)}


def test_ngrams_keep_drafts_apart_that_mix_without_them() -> None:
    """Two names, two ways to go on: the model, which sees both at once, says both ways for both."""
    grams = Counted({(1,): 5, (2,): 5, (1, 3): 5, (2, 4): 5, (3,): 5, (4,): 5})
    drafts = Drafts(((1,), (2,)), np.log([0.5, 0.5]))
    logits, start = torch.tensor([-9.0, -9.0, -9.0, 0.1, 0.0]), Start(0, [0], [0], grams, 4)
    apart = further(drafts, logits, start, Superposition(drafts=2, temperature=1.0), NO_ENDS)
    mixed = further(drafts, logits, start, Superposition(drafts=2, temperature=1.0, alpha=0), NO_ENDS)
    assert set(apart.paths) == {(1, 3), (2, 4)} and set(mixed.paths) == {(1, 3), (2, 3)}


def test_a_tree_has_the_best_shared_beginnings() -> None:
    drafts = Drafts(((1, 2, 3), (1, 2, 4), (5, 6, 7)), np.log([0.5, 0.3, 0.2]))
    tree = tree_of(9, drafts, Budget(5, 3), "superposed")
    assert tree.path_tokens(3)[:3] in ([1, 2, 3], [1, 2]) and len(tree) == 6 and tree.tokens[0] == 9
    assert {tuple(tree.path_tokens(node)) for node in range(1, 6)} == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)}


def run(target: Any, drafter: Any, prompts: Any = PROMPTS, budget: int = 12, **sampling: Any) -> Any:
    recipe = PLAIN if drafter is None else Recipe(drafter.name, drafter, Invariant(), Fixed(Budget(budget, 4)))
    engine = Engine(target, PLAIN, strict=True)
    params = SamplingParams(**{"max_new_tokens": 24, "seed": 5} | sampling)
    return [handle.result() for handle in [engine.submit(prompt, params, recipe) for prompt in prompts]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plains_and_the_target_as_its_draft_is_accepted(model: Any, temperature: float) -> None:
    target, draft = eager_target(model, max_slots=3), eager_target(model, max_slots=3)
    drafter = Superposed(draft, embed=model.get_input_embeddings())
    found = run(target, drafter, temperature=temperature)
    assert [g.token_ids for g in found] == [g.token_ids for g in run(target, None, temperature=temperature)]
    assert sum(g.stats.accepted for g in found) > 0 and draft.free_slots == 3


@pytest.mark.slow
def test_accepted_length_is_above_a_chains_at_equal_forwards(model: Any) -> None:
    """Both run the draft model four times a step; the draft is the target, less some of its precision."""
    torch.manual_seed(3)
    blurred = llama(1)
    with torch.no_grad():
        for weight in blurred.parameters():
            weight.add_(0.12 * weight.std() * torch.randn_like(weight)) if weight.ndim == 2 else None
    target, prompts = eager_target(model, max_slots=6), [[i, 2 * i % 53, 5] for i in range(12)]
    several = Superposed(eager_target(blurred, max_slots=6), embed=blurred.get_input_embeddings())
    one = Grown(ModelSource(eager_target(blurred, max_slots=6)), Chain())
    steps = [sum(g.stats.steps for g in run(target, drafter, prompts, 12)) for drafter in (several, one)]
    assert steps[0] < 0.95 * steps[1]


@pytest.mark.slow
def test_a_mixture_with_the_wrong_shares_is_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the least likely draft weighs most. Its tree is accepted less."""
    target, prompts = eager_target(model, max_slots=6), [[i, 2 * i % 53, 5] for i in range(8)]
    steps = []
    for bug in (False, True):
        if bug:
            wrong = property(lambda self: made.shares_of(self.scores)[::-1].copy())
            monkeypatch.setattr(made.Drafts, "weights", wrong)
        drafter = Superposed(eager_target(model, max_slots=6), embed=model.get_input_embeddings())
        steps.append(sum(g.stats.steps for g in run(target, drafter, prompts, 64)))
    assert steps[0] < 0.9 * steps[1]


@pytest.mark.slow
def test_it_passes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the target's first layer as its draft model."""
    monkeypatch.setattr(gate, "one_a_family", lambda: ["prompt-lookup"])  # enumerations have tests of their own
    monkeypatch.setattr(exhaustive, "SMALL", ((1, 1),))
    monkeypatch.setattr(exhaustive, "SHAPES", ((1, 1),))
    monkeypatch.setattr(exhaustive, "CASES", exhaustive.CASES[:1])
    loaded, options = load_model(llama(1).requires_grad_(False)), {"layers": "1", "depth": "3"}
    report = gate.check(loaded, "superposed", options, size=gate.Size(3, 24, 20, 5, 16, 16, 60, 3, False))
    assert report.verdict == "same output" and report.status == 0, [part.summary for part in report.parts]
