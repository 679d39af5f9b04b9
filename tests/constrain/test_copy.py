"""Quotes are stretches of the prompt, nothing of the output; what may follow is what a search by hand finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.toy import ToyLM, ToyTarget
from outrider.constrain.copy import CopyFrom, Stretches
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.lookup.jump_forward import JumpForward
from outrider.verify.invariant import Invariant

OPEN, CLOSE, V = 5, 6, 8


def allowed(automaton: CopyFrom, state: object) -> set[int]:
    (row,) = automaton.mask([state])  # type: ignore[list-item]
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def by_hand(source: list[int], quoted: list[int], barriers: set[int]) -> set[int]:
    """Tokens behind the places where `quoted` stands, without crossing a barrier."""
    found = set()
    for i in range(len(source) - len(quoted)):
        stretch = source[i : i + len(quoted) + 1]
        if stretch[:-1] == quoted and not barriers & {*stretch}:
            found.add(stretch[-1])
    return found


@given(st.lists(st.integers(0, 3), max_size=50), st.lists(st.integers(0, 2), max_size=8), st.booleans())
@settings(max_examples=400)
def test_what_may_follow_is_what_a_search_by_hand_finds(source: list[int], wanted: list[int], marked: bool) -> None:
    """3 is a barrier."""
    form = CopyFrom(V, *((OPEN, CLOSE) if marked else ()), barriers=frozenset({3}))
    state = form.start(source)
    if marked:
        assert allowed(form, state) == set(range(V)) and form.complete(state)
        state = form.advance(state, OPEN)
    quoted: list[int] = []
    for token in wanted:
        expected = by_hand(source, quoted, {3, OPEN, CLOSE})
        assert state is not None and allowed(form, state) == expected | ({CLOSE} if marked else set())
        assert {t for t in range(V) if form.allows(state, t)} == allowed(form, state)
        for run in form.continuations(state):
            for i in range(len(run)):
                assert run[i] in by_hand(source, quoted + run[:i], {3, OPEN, CLOSE})
        if token not in expected:
            assert form.advance(state, token) is None
            return
        state = form.advance(state, token)
        quoted.append(token)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_counts_are_how_often_a_stretch_occurs(source: list[int]) -> None:
    made = Stretches(source)
    for token, node in made.edges[0].items():
        for second, behind in made.edges[node].items():
            assert made.counts[behind] == sum(source[i : i + 2] == [token, second] for i in range(len(source)))


def test_a_long_quote_may_only_be_closed_and_markers_are_never_quoted() -> None:
    form = CopyFrom(V, OPEN, CLOSE, longest=3)
    state = form.advance(form.start([1, 2, 1, 2, OPEN, 4, CLOSE]), OPEN)
    for token in (1, 2, 1):
        assert OPEN not in allowed(form, state)
        state = form.advance(state, token)
    assert allowed(form, state) == {CLOSE} and not form.complete(state)
    outside = form.advance(state, CLOSE)
    assert form.complete(outside) and allowed(form, outside) == set(range(V))
    with pytest.raises(InputError, match="two different token ids"):
        CopyFrom(V, 5, 5)


def spans(tokens: list[int]) -> list[list[int]]:
    out: list[list[int]] = []
    inside = False
    for token in tokens:
        if token == CLOSE and inside:
            inside = False
        elif inside:
            out[-1].append(token)
        elif token == OPEN:
            inside = True
            out.append([])
    return out


@pytest.mark.parametrize("wanted", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_all_quoted_spans_are_stretches_of_the_prompt(wanted: int) -> None:
    rng = np.random.default_rng(0)
    lm = ToyLM(V, seed=5, concentration=2.0)
    plain, quick = (
        Engine(ToyTarget(lm, slots=16, max_context=256), Recipe("toy", drafter, Invariant(), Fixed(Budget(8, 8))))
        for drafter in (None, JumpForward())
    )
    count, number = 0, 0
    while count < wanted:
        number += 1
        prompt = rng.integers(0, 5, 24).tolist()
        bias = {OPEN: 2.0, CLOSE: -1.0}
        params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=number, logit_bias=bias, n=8)
        form = CopyFrom(V, OPEN, CLOSE)
        made = quick.submit(prompt, params, constraint=form).results()
        if number == 1:
            expected = plain.submit(prompt, params, constraint=form).results()
            assert [g.token_ids for g in made] == [g.token_ids for g in expected]
            assert sum(g.stats.steps for g in made) < sum(g.stats.steps for g in expected)
        text = " ".join(map(str, prompt))
        for g in made:
            for span in spans(g.token_ids):
                count += 1
                assert f" {' '.join(map(str, span))} " in f" {text} " or not span
