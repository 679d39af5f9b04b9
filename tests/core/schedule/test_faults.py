"""Faults and leaving: one request ends and nothing of it stays; five methods in one batch say what each says alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.control.fixed import Fixed
from outrider.core.errors import PassFailed
from outrider.core.protocols import Drafter, Recipe
from outrider.core.records import Budget, Needs, Piece, Scores
from outrider.core.schedule import Handle, Terms
from outrider.draft.forced import Forced
from outrider.draft.grown import Grown
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.draft.lookup.suffix import Suffix
from outrider.draft.model.draft_model import ModelSource
from outrider.draft.table.recycling import Recycling
from outrider.grow.chain import Chain
from outrider.verify.invariant import Invariant
from tests.core.schedule.toys import PLAIN, PROMPTS, SAMPLED, VOCAB, Pool, engine, said


def five(draft_target: Any) -> list[Recipe]:
    drafters: list[Drafter] = [
        PromptLookup(), Suffix(memory_bytes=1 << 20), Recycling(VOCAB), Grown(ModelSource(draft_target), Chain()),
    ]  # fmt: skip
    made = [Recipe(drafter.name, drafter, Invariant(), Fixed(Budget(5, 3))) for drafter in drafters]
    return [PLAIN, *made]


class Guilty(Pool):
    """No pass runs that has a row of a text which begins with this token; `trees`: or any candidate."""

    def __init__(self, first: int, trees: bool = False, **more: Any) -> None:
        super().__init__(**more)
        self.first, self.trees, self.failures = first, trees, 0

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        for piece in pieces:
            text = [*self.committed(piece.slot), *piece.tokens, *(piece.tree.tokens if piece.tree else ())]
            if text[0] == self.first or (self.trees and piece.tree is not None and piece.tree.candidates):
                self.failures += 1
                raise RuntimeError("planted")
        return super().run(pieces, needs)


def test_a_forward_that_fails_on_purpose_ends_one_request_only() -> None:
    target = Guilty(4, slots=8, prompt_rows=64)
    made = engine(target)
    prompts = [*PROMPTS[:3], [4, 1, 2, 3], *PROMPTS[1:]]
    handles = [made.submit(prompt, SAMPLED, five(Pool())[i % 3]) for i, prompt in enumerate(prompts)]
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        if i == 3:
            with pytest.raises(PassFailed, match="planted"):
                handle.result()
        else:
            assert handle.result().token_ids == said(prompt)
    assert target.failures <= 8 and target.free_slots == 8  # all, all plainly, and halves of seven


def test_a_pass_that_fails_with_candidates_goes_on_without_them() -> None:
    target = Guilty(-1, trees=True, prompt_rows=64)
    made = engine(target)
    handles = [made.submit(prompt, SAMPLED, five(Pool())[1]) for prompt in PROMPTS]
    assert [h.result().token_ids for h in handles] == [said(prompt) for prompt in PROMPTS]
    assert target.failures > 0 and not any(h.result().stats.accepted for h in handles)


def test_an_error_in_what_a_caller_gave_ends_his_request_alone() -> None:
    made = engine()

    def broken(tokens: Any) -> bool:
        raise ZeroDivisionError("planted")

    bad, good = made.submit(PROMPTS[1], SAMPLED, stop_check=broken), made.submit(PROMPTS[1], SAMPLED)
    assert good.result().token_ids == said(PROMPTS[1])
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_64_requests_with_five_methods_mixed_say_what_plain_decoding_says() -> None:
    small = Pool(slots=16)
    made, methods = engine(Pool(tokens=220, slots=12, prompt_rows=16)), five(small)
    cases = [(PROMPTS[i % 4], SAMPLED.with_(seed=i % 7, temperature=float(i % 3 > 0))) for i in range(64)]
    handles = [
        made.submit(prompt, params, methods[i % 5], terms=Terms(caller=str(i % 3), priority=i % 2))
        for i, (prompt, params) in enumerate(cases)
    ]
    want = {case: said(*case) for case in {(tuple(prompt), params) for prompt, params in cases}}
    for handle, (prompt, params) in zip(handles, cases, strict=True):
        result = handle.result()
        assert result.token_ids == want[tuple(prompt), params] and result.stats.drafter_failures == 0
    assert made.target.free_slots == 12 and small.free_slots == 16


def test_1000_cancellations_at_random_steps_leave_everything_as_before() -> None:
    rng = random.Random(5)
    small, target = Pool(slots=8, keeps=False), Pool(tokens=150, slots=8, prompt_rows=16, keeps=False)
    made, methods = engine(target), five(small)
    answers = {tuple(prompt): said(prompt) for prompt in PROMPTS}
    methods.append(Recipe("forced", Forced(lambda c: answers[tuple(c.prompt)], VOCAB, 0.8, 1), Invariant(),
                          Fixed(Budget(4, 3))))  # fmt: skip
    live: list[Handle] = []
    cancelled = 0
    while cancelled < 1000:
        while len(live) < 14:
            live.append(made.submit(rng.choice(PROMPTS), SAMPLED, rng.choice(methods)))
        for _ in range(rng.randrange(3)):
            made.step()
        for handle in rng.sample(live, 4):
            cancelled += not handle.done
            handle.cancel()
            live.remove(handle)
        live = [handle for handle in live if not handle.done]
    for handle in live:
        assert handle.result().token_ids == answers[tuple(handle.sequences[0].prompt)]
    made.step()
    assert target.free_slots == 8 and target.used == 0 and small.free_slots == 8 and small.used == 0
    assert not made.running and not made.queue and not made._live and not made.queue._lines
    for method in methods[1:4]:
        held = [getattr(method.drafter, name, None) for name in ("_slots", "_seats", "_texts")]
        assert any(value == {} for value in held) and not any(held), method.name
