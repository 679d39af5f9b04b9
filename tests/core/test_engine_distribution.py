"""The whole loop on toy models, every outcome enumerated: several steps of drafting give the target's distribution.

The rows are float32 inside the loop, so distributions are compared to 1e-6; a planted bug moves them by a hundred
thousand times as much.
"""

from __future__ import annotations

import pytest

from outrider.check.enumeration import Branches, outcomes
from outrider.check.exhaustive import CONTEXT, plain_distribution
from outrider.check.toy import ToyLM, ToySource, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.grown import Grown
from outrider.grow.chain import Chain
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection

TOKENS = 4
PROMPT = CONTEXT


def distribution(verifier, *, depth: int) -> dict[tuple[int, ...], float]:
    def generate(paths: Branches) -> tuple[int, ...]:
        drafter = Grown(ToySource(ToyLM(3, seed=7)), Chain(), sampled=verifier.coupled)
        recipe = Recipe("toy", drafter, verifier, Fixed(Budget(depth, depth)))
        engine = Engine(
            ToyTarget(ToyLM(3, seed=11)), recipe, strict=True,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=0)
        return tuple(engine.submit(PROMPT, params).result().token_ids)

    return outcomes(generate, limit=200_000)


def distance(found: dict[tuple[int, ...], float]) -> float:
    want = plain_distribution(ToyLM(3, seed=11), TOKENS)
    assert sum(found.values()) == pytest.approx(1.0)
    return max(abs(found.get(key, 0.0) - want.get(key, 0.0)) for key in {*found, *want})


@pytest.mark.parametrize("verifier", [Invariant(), Rejection(), Recursive()], ids=lambda v: v.name)
@pytest.mark.parametrize("depth", [1, 2])
def test_generated_text_has_the_targets_distribution(verifier, depth: int) -> None:
    assert distance(distribution(verifier, depth=depth)) < 1e-6


def test_a_wrong_residual_is_seen(monkeypatch) -> None:
    monkeypatch.setattr("outrider.verify.rejection.after_rejection", lambda left, mass, row: (left, mass))
    assert distance(distribution(Rejection(), depth=1)) > 0.01


def test_a_draft_that_reports_another_distribution_than_it_drew_from_is_seen() -> None:
    class Liar(ToySource):
        def start(self, slots):
            return [type(row)(row.ids, row.probs[::-1].copy()) for row in super().start(slots)]

    class Grower(Chain):
        def grow(self, source, slots, pending, budgets, noise):
            trees = super().grow(source, slots, pending, budgets, noise)
            for tree in trees:
                for draws in tree.draws:
                    for draw in draws:
                        draw.row.probs[:] = draw.row.probs[::-1].copy()
            return trees

    def generate(paths: Branches) -> tuple[int, ...]:
        drafter = Grown(Liar(ToyLM(3, seed=7)), Grower(), sampled=True)
        engine = Engine(
            ToyTarget(ToyLM(3, seed=11)), Recipe("toy", drafter, Rejection(), Fixed(Budget(1, 1))), strict=True,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=0)
        return tuple(engine.submit(PROMPT, params).result().token_ids)

    assert distance(outcomes(generate, limit=200_000)) > 0.01
