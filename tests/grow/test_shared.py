"""Shared noise: the draft's first arrival is what `pick` would choose; the text stays plain, more is accepted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import methods
from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.noise import DRAFT, VERIFY, StreamNoise
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.grow.shared import SharedRace
from outrider.methods import Options, registry
from outrider.verify.invariant import Invariant
from outrider.verify.rejection import Rejection

PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))


@given(st.integers(2, 60), st.integers(0, 10_000), st.lists(st.integers(0, 59), max_size=5))
def test_the_first_arrival_is_the_pick_of_the_same_distribution(size: int, seed: int, path: list[int]) -> None:
    probs = np.random.default_rng(seed).dirichlet([0.5] * size)
    draft, verify = (StreamNoise(seed, 0, stream, 3, 40) for stream in (DRAFT, VERIFY))
    order = draft.first(np.arange(size), probs, path, size)
    assert order[0] == verify.pick(torch.from_numpy(probs), path)
    assert sorted(order) == list(range(size))
    ids = np.random.default_rng(seed + 1).permutation(size)  # the order of the row does not matter, only the token ids
    assert ids[draft.first(ids, probs[ids], path, size)].tolist() == order


def results(recipe: Recipe) -> list:
    engine = Engine(ToyTarget(ToyLM(5, seed=3), slots=8), PLAIN, strict=True)
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=4)
    handles = [engine.submit([i % 5, 1], params, recipe) for i in range(8)]
    return [handle.result() for handle in handles]


def drafted(grower, shared: bool) -> Recipe:
    near = ToyLM(5, seed=3, concentration=1.0)  # the target's own law: with its noise every draft is right
    drafter = Grown(ToySource(near), grower, sampled=shared, shared_noise=shared)
    return Recipe("toy", drafter, Invariant(), Fixed(Budget(4, 4)))


def test_text_is_plain_decodings_and_a_perfect_draft_is_always_accepted() -> None:
    plain = results(PLAIN)
    shared, guessed = results(drafted(SharedRace((1, 1, 1, 1)), True)), results(drafted(Chain(), False))
    assert [g.token_ids for g in shared] == [g.token_ids for g in guessed] == [g.token_ids for g in plain]
    assert all(rate == 1.0 for g in shared for rate in g.stats.acceptance_by_depth)
    assert np.mean([g.stats.mean_accepted for g in guessed]) < 3


def test_later_arrivals_become_siblings_within_the_budget() -> None:
    (tree,) = SharedRace((3, 2)).grow(
        _started(), [0], [1], [Budget(7, 5)], [StreamNoise(1, 0, DRAFT, 0, 2)]
    )  # fmt: skip
    assert tree.candidates == 7 and tree.depth == 2 and len(tree.children(0)) == 3
    assert not tree.is_sampled


def _started() -> ToySource:
    source = ToySource(ToyLM(5, seed=3))
    source.begin(0, SimpleNamespace(tokens=np.array([0, 1]), temperature=1.0))  # type: ignore[arg-type]
    return source


def test_a_coupled_rule_refuses_shared_noise() -> None:
    drafter = Grown(ToySource(ToyLM(5)), SharedRace(), sampled=True, shared_noise=True)
    recipe = Recipe("x", drafter, Rejection(), Fixed(Budget(1, 1)))
    info = methods.MethodInfo("x", "x", "-", "test", True, "nothing", Options, lambda *_: recipe)
    methods.register(info)
    try:
        with pytest.raises(InputError, match="draws with the target's own noise"):
            methods.build("x", None, None)  # type: ignore[arg-type]
    finally:
        registry._METHODS.pop("x")
