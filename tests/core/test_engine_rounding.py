"""Rounded logits: the engine allows them only where nothing but the largest of each row is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import LlamaForCausalLM

from outrider.core.engine import Engine
from outrider.core.records import Needs, Piece, Scores
from outrider.core.sampling import SamplingParams
from outrider.runtime.eager.backend import EagerBackend
from outrider.runtime.slots import SlotTarget
from tests.core.test_engine import PLAIN, PROMPTS, engine, forced, model, run

__all__ = ["engine", "model"]  # fixtures


class Rounding(SlotTarget):
    """Tells nothing but the largest logit of each row wherever that is allowed."""

    asked: list[bool]

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        scores = super().run(pieces, needs)
        if any(piece.tree is None for piece in pieces):
            return scores
        self.asked.append(needs.rounded)
        if not needs.rounded:
            return scores
        largest = [rows.logits == rows.logits.amax(1, keepdim=True) for rows in scores]
        return [replace(s, logits=s.logits.where(top, -1e4)) for s, top in zip(scores, largest, strict=True)]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, {True}), ({"stop_token_ids": (4,)}, {True}), ({"logprobs": 2}, {False}),
        ({"min_new_tokens": 9, "stop_token_ids": (60,)}, {True, False}),
        ({"temperature": 0.8}, {False}), ({"repetition_penalty": 1.3}, {False}),
        ({"frequency_penalty": 0.7}, {False}), ({"logit_bias": {5: 2.0}}, {False}), ({"bad_words": ((7,),)}, {False}),
    ],
)  # fmt: skip
def test_logits_may_be_rounded_only_where_nothing_but_the_largest_is_looked_at(
    model: LlamaForCausalLM, engine: Engine, changes: dict[str, object], allowed: set[bool]
) -> None:
    params = SamplingParams(max_new_tokens=20, seed=1, **changes)
    want = run(engine, PROMPTS, params)
    target = Rounding(EagerBackend(model), max_slots=4)
    target.asked = []
    rounding = Engine(target, PLAIN, strict=True)
    for recipe in (PLAIN, forced(want, 0.6, 2)):
        got = run(rounding, PROMPTS, params, recipe)
        assert [g.token_ids for g in got] == [g.token_ids for g in want]
        for made, exact in zip(got, want, strict=True):
            raw = [p.raw for p in exact.logprobs or ()]
            assert [p.raw for p in made.logprobs or ()] == pytest.approx(raw, abs=1e-4)
    assert set(target.asked) == allowed


def test_one_sampled_sequence_keeps_the_logits_of_its_whole_batch(model: LlamaForCausalLM, engine: Engine) -> None:
    target = Rounding(EagerBackend(model), max_slots=2)
    target.asked = []
    both = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=8, temperature=0.9, seed=2)]
    wants = [run(engine, PROMPTS[:1], params)[0].token_ids for params in both]
    rounding = Engine(target, PLAIN, strict=True)
    handles = [rounding.submit(PROMPTS[0], params, PLAIN) for params in both]
    assert [h.result().token_ids for h in handles] == wants
    assert target.asked == [False] * 8 + [True] * 4
