"""What an automaton lets a sequence say is asked at each node's own state; stop ids come where it is complete."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.constrain.finite import Finite
from outrider.core.errors import EmptySupport, InputError
from outrider.core.legal import Legal, ban
from outrider.core.protocols import Automaton
from outrider.core.sampling import History, SamplingParams
from outrider.core.target_rows import TargetRows
from outrider.core.together import Both, split
from outrider.core.tree import from_paths

V = 70  # more than two words of a mask
END, SECOND = 69, 3
# 5 6 (1 | 2)* 4, where 7 after 4 makes it longer
TABLE = Finite([{5: 1}, {6: 2}, {1: 2, 2: 2, 4: 3}, {7: 2}], frozenset({3}), V)


def legal_of(automaton: Automaton = TABLE, said: Sequence[int] = (), also_text: Sequence[int] = ()) -> Legal:
    legal = Legal(automaton, (9, 9), V, {END, SECOND}, also_text)
    for token in said:
        legal.append(token)
    return legal


def allowed(row: np.ndarray | None) -> set[int]:
    assert row is not None
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_a_mask_is_of_the_nodes_own_state_and_not_of_the_roots_or_a_siblings() -> None:
    tree = from_paths(9, [[5, 6, 1], [5, 6, 4, 7], [6, 1]])
    masks = legal_of().masks(tree)
    expected = {(): {5}, (5,): {6}, (5, 6): {1, 2, 4}, (5, 6, 1): {1, 2, 4}, (5, 6, 4): {7, END, SECOND}}
    for node in range(len(tree)):
        path = tuple(tree.path_tokens(node))
        want = expected.get(path, {1, 2, 4} if path == (5, 6, 4, 7) else set(range(96)))  # below the illegal 6: all
        assert allowed(masks[node]) == want, path


@given(st.lists(st.sampled_from([1, 2, 4, 5, 6, 7]), max_size=6), st.lists(st.integers(0, V - 1), max_size=4))
@settings(max_examples=200, deadline=None)
def test_paths_and_text_say_the_same(walk: list[int], path: list[int]) -> None:
    """What a path leads to is what the same tokens as text lead to."""
    said: list[int] = []
    for token in walk:
        if legal_of(said=said).allows(token):
            said.append(token)
    below = legal_of(said=said)
    for cut in range(len(path) + 1):
        reached = legal_of(said=said)
        for token in path[:cut]:
            reached.append(token)
        for token in (*path, END, SECOND, 1):
            assert below.allows(token, path[:cut]) == reached.allows(token)
        one, other = below.mask(path[:cut]), reached.mask()
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


@given(
    st.lists(st.sampled_from([1, 2, 4, 5, 6, 7]), max_size=4),
    st.lists(st.floats(-9, 9, width=16) | st.just(-math.inf), min_size=V, max_size=V),
)
@settings(max_examples=200, deadline=None)
def test_the_likeliest_that_may_follow_is_that_of_the_masked_row(path: list[int], scores: list[float]) -> None:
    history = History((9, 9), SamplingParams(temperature=0), V, frozenset({END, SECOND}), legal=legal_of())
    row = torch.tensor(scores)
    try:
        expected = int(history.process(row, path).argmax())
    except EmptySupport:
        with pytest.raises(EmptySupport):
            history.likeliest(row, path)
    else:
        assert history.likeliest(row, path) == expected
        assert history.likeliest(row.half(), path) == int(history.process(row.half(), path).argmax())


def test_single_answers_and_masks_agree() -> None:
    for said in ([], [5], [5, 6], [5, 6, 4]):
        legal = legal_of(said=said)
        assert allowed(legal.mask()) == {token for token in range(V) if legal.allows(token)}
        assert not legal.allows(V)


def test_stop_ids_come_only_where_the_text_may_end_and_nothing_is_restricted_behind_them() -> None:
    legal = legal_of(said=[5, 6])
    assert not legal.allows(END) and not legal.complete
    legal.append(4)
    assert legal.allows(END) and legal.allows(SECOND) and legal.complete
    assert legal.mask((END,)) is None and legal.allows(11, (END,))
    table = Finite([{SECOND: 1}, {END: 1}], frozenset({1}), V)
    assert allowed(legal_of(table, also_text=[SECOND]).mask()) == {SECOND}  # a stop id of the request that is text
    assert allowed(legal_of(table).mask()) == set()
    assert allowed(legal_of(table, said=[SECOND], also_text=[SECOND]).mask()) == {END, SECOND}


def test_what_is_forced_is_said_up_to_the_choice_and_the_one_end_is_part_of_it() -> None:
    assert legal_of().forced() == [5, 6]
    assert legal_of().forced((5, 6)) == []
    assert legal_of().forced((5, 6, 4)) == []  # two ids end the text, and 7 goes on
    last = Finite([{1: 1}, {2: 2}, {}], frozenset({2}), V)
    assert Legal(last, (), V, {END}).forced() == [1, 2, END]
    assert Legal(last, (), V, {END, SECOND}).forced() == [1, 2]


def test_a_text_that_is_complete_without_an_id_to_end_it_is_exhausted() -> None:
    last = Finite([{1: 1}, {}], frozenset({1}), V)
    legal = Legal(last, (), V)
    assert not legal.exhausted
    legal.append(1)
    assert legal.exhausted
    ended = Legal(last, (), V, {END})
    ended.append(1)
    assert not ended.exhausted


def test_behind_the_node_where_a_text_without_an_end_id_ends_nothing_is_restricted() -> None:
    """A tree may hold the last token: the row behind it is looked at, and must not be one without a token to say."""
    last = Finite([{1: 1}, {}], frozenset({1}), V)
    legal = Legal(last, (), V)
    assert legal.mask((1,)) is None and legal.allows(5, (1,))
    assert Legal(last, (), V, {END}).mask((1,)) is not None
    stuck = Legal(Finite([{1: 1}, {}], frozenset(), V), (), V)
    assert allowed(stuck.mask((1,))) == set()  # not complete: a dead end is none


@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_banning_bits_is_filling_what_is_not_set(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (3, -(-size // 32))).astype(np.int32)
    words[0] = -1
    scores = torch.from_numpy(rng.normal(size=(3, size)).astype(np.float32))
    keep = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :size].astype(bool)
    expected = np.where(keep, scores.numpy(), -np.inf)
    assert np.array_equal(ban(scores.clone(), words).numpy(), expected)
    for i in range(3):
        assert np.array_equal(ban(scores[i].clone(), words[i]).numpy(), expected[i])


def rows_of(params: SamplingParams, likeliest: Sequence[int] | None = None) -> tuple[TargetRows, torch.Tensor]:
    tree = from_paths(9, [[5, 6, 1], [5, 6, 4]])
    logits = torch.randn(len(tree), V, generator=torch.Generator().manual_seed(3))
    history = History((9, 9), params, V, frozenset({END, SECOND}), legal=legal_of())
    return TargetRows(logits, tree, history, likeliest), logits


def test_rows_stand_on_legal_tokens_only_and_the_argmax_is_the_largest_of_them() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_k=2, top_p=0.9)):
        rows, logits = rows_of(params)
        for node, legal in enumerate([{5}, {6}, {1, 2, 4}, {1, 2, 4}, {7, END, SECOND}]):
            assert set(torch.nonzero(rows.probs(node)).flatten().tolist()) <= legal
            if params.greedy:
                assert rows.argmax(node) == max(legal, key=lambda token: logits[node, token])


def test_a_known_argmax_is_used_where_the_mask_lets_it_stand_and_only_there() -> None:
    rows, _ = rows_of(SamplingParams(), likeliest=[5, 8, 2, 8, 7])  # at 1 and 3 it is illegal
    _, logits = rows_of(SamplingParams())
    assert [rows.argmax(node) for node in (0, 2, 4)] == [5, 2, 7]
    assert rows.argmax(1) == 6
    assert rows.argmax(3) == max((1, 2, 4), key=lambda token: logits[3, token])


def test_a_minimum_length_against_a_grammar_that_ends_the_text_is_named() -> None:
    last = Finite([{1: 1}, {}], frozenset({1}), V)
    history = History((9,), SamplingParams(min_new_tokens=5), V, frozenset({END}), legal=Legal(last, (), V, {END}))
    history.append([1])
    with pytest.raises(EmptySupport, match="min_new_tokens"):
        history.process(torch.zeros(V))


def test_draft_rows_are_masked_by_their_own_paths() -> None:
    history = History((9,), SamplingParams(temperature=1.0), V, frozenset({END, SECOND}), legal=legal_of())
    rows = history.draft_rows(torch.zeros(3, V), [(), (5,), (5, 6)], 8)
    assert [set(row.ids.tolist()) for row in rows] == [{5}, {6}, {1, 2, 4}]
    assert math.isclose(rows[2].probs.sum(), 1.0)


def test_two_automata_allow_what_both_allow() -> None:
    odd = Finite([dict.fromkeys((5, 6, 1, 4, 7), 0)], frozenset({0}), V)
    _, both = split([TABLE, odd])
    assert isinstance(both, Both)
    legal = legal_of(both, said=[5, 6])
    assert allowed(legal.mask()) == {1, 4} and not legal.allows(2) and legal.allows(4)
    assert legal_of(both).forced() == [5, 6]
    with pytest.raises(InputError, match="constraint is of type int"):
        split(3)  # type: ignore[arg-type]


def test_states_of_candidates_that_became_text_are_not_made_again() -> None:
    class Counted(Finite):
        def advance(self, state: int, token: int) -> int | None:
            advanced.append(token)
            return super().advance(state, token)

    advanced: list[int] = []
    legal = legal_of(Counted(TABLE.table, TABLE.accepting, V))
    assert legal.continues(5) and legal.continues(6, (5,)) and legal.continues(1, (5, 6))
    assert not legal.continues(4, (5,)) and not legal.continues(END, (5, 6))
    before = len(advanced)
    for token in (5, 6, 1):
        legal.append(token)
    assert len(advanced) == before, "a state was made twice"
    assert allowed(legal.mask()) == allowed(legal_of(said=[5, 6, 1]).mask()) == {1, 2, 4}


@given(st.integers(1, 200), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_legal_mass_is_the_sum_over_the_bits(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.random(size) < rng.choice([0.0, 0.5, 1.0])
    form = Finite([{int(token): 0 for token in np.flatnonzero(bits)}], frozenset(), size)
    probs = torch.softmax(torch.from_numpy(rng.normal(size=size).astype(np.float32)), 0)
    assert Legal(form, (), size).mass(probs) == pytest.approx(float(probs.double().numpy()[bits].sum()), abs=1e-9)
