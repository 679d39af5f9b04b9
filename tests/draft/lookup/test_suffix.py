"""The automaton's counts and matches equal naive ones; proposals equal a brute-force oracle, also after evictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import methods
from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.protocols import Remembers
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import History, SamplingParams
from outrider.core.tree import TokenTree, root
from outrider.draft.lookup.suffix import LEAST_BYTES, Suffix, classify, first_guess
from outrider.draft.lookup.suffix_index import (
    COUNT,
    EDGES,
    LATEST,
    STATES,
    TO,
    TOKEN,
    TOP,
    WIDTH,
    SuffixIndex,
    earlier,
    match,
)

LEVELS = 2
texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=5)
depths = st.integers(2, 7)


def array(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def places(text: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `text`."""
    return [i for i in range(len(part), len(text) + 1) if text[i - len(part) : i] == part]


def occurrences(texts: list[list[int]], part: list[int]) -> list[tuple[int, int]]:
    return [(which, end) for which, text in enumerate(texts) for end in places(text, part)]


def index_of(texts: list[list[int]], depth: int) -> SuffixIndex:
    index = SuffixIndex(sum(map(len, texts)), depth)
    for text in texts:
        index.separate()
        for start in range(0, len(text), 5):
            index.extend(array(text[start : start + 5]))
    return index


@given(texts, depths)
def test_counts_of_all_short_substrings_equal_naive_counting(texts, depth) -> None:
    index = index_of(texts, depth)
    parts = {tuple(t[i : i + n]) for t in texts for n in range(1, depth + 1) for i in range(len(t) - n + 1)}
    assert {part: index.count(array(part)) for part in parts} == {
        part: len(occurrences(texts, list(part))) for part in parts
    }
    size = len(index)
    assert index.arrays[3][STATES] <= max(2 * size - 1, 2) and index.arrays[3][EDGES] <= 3 * size


@given(texts, depths)
def test_a_match_never_spans_two_texts(texts, depth) -> None:
    index = index_of(texts, depth)
    for first, second in pairwise(texts):
        across = [*first[-1:], *second[:1]]
        assert index.count(array(across)) == len(occurrences(texts, across))


@given(texts, depths, st.lists(st.integers(0, 3), max_size=12))
def test_the_longest_match_equals_the_oracle(texts, depth, tail) -> None:
    index = index_of(texts, depth)
    best = max(n for n in range(len(tail) + 1) if not n or occurrences(texts, tail[-n:]))
    assert match(index.arrays, array(tail))[1] == best


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), depths)
def test_the_longest_earlier_match_is_found_and_never_the_text_itself(text, depth) -> None:
    index = index_of([text], depth)
    best = max(n for n in range(len(text)) if n == 0 or len(places(text, text[-n:])) > 1)
    state, length = earlier(index.arrays, depth - 1)
    assert length == min(best, depth - 1)
    if length:
        assert index.arrays[0][state, COUNT] == len(places(text, text[-length:]))
        assert index.arrays[0][state, LATEST] == len(text)


@given(texts, depths)
def test_the_most_frequent_continuations_are_kept_in_order(texts, depth) -> None:
    index = index_of(texts, depth)
    states, edges, _, _ = index.arrays
    for part in {tuple(t[i : i + n]) for t in texts for n in range(1, depth) for i in range(len(t) - n + 1)}:
        state, _ = match(index.arrays, array(part))
        kept = [states[state, i] - 1 for i in range(TOP, TOP + WIDTH) if states[state, i]]
        assert [(edges[e, TOKEN], states[edges[e, TO], COUNT]) for e in kept] == naive_next(texts, list(part))


def naive_next(texts: list[list[int]], part: list[int]) -> list[tuple[int, int]]:
    """Tokens behind `part` and how often, the most frequent first, then the latest; as many as a state keeps."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for which, end in occurrences(texts, part):
        if end < len(texts[which]):
            seen.setdefault(texts[which][end], []).append((which, end))
    order = sorted(seen, key=lambda token: (len(seen[token]), seen[token][-1]), reverse=True)
    return [(token, len(seen[token])) for token in order[:WIDTH]]


@dataclass
class Oracle:
    """The drafter's rule by naive search through lists: own text, then each half of the finished requests."""

    depth: int
    text: list[int]
    halves: list[list[list[int]]]
    evidence: np.ndarray = field(default_factory=first_guess)

    def propose(self, nodes: int, deepest: int) -> list[tuple[tuple[int, ...], float]]:
        """Paths below the pending token with their weights, in the order in which they are taken."""
        taken: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        waiting: list[tuple[float, tuple[int, ...]]] = []
        while True:
            path, weight = taken[-1]
            if len(path) < deepest:
                waiting += [(weight * chance, (*path, token)) for token, chance in self.guesses(path).items()]
            if not waiting or len(taken) > nodes:
                return taken[1:]
            best = max(range(len(waiting)), key=lambda i: (waiting[i][0], -i))
            chosen = waiting.pop(best)
            taken.append((chosen[1], chosen[0]))

    def guesses(self, path: tuple[int, ...]) -> dict[int, float]:
        guesses: dict[int, float] = {}
        for which, texts in enumerate([[self.text], *self.halves]):
            context = [*self.text, *path][-self.depth * 3 :]
            level, before = 0, None
            for n in range(min(len(context), self.depth - 1), 0, -1):
                found = occurrences(texts, context[-n:])
                going_on = [(w, end) for w, end in found if end < len(texts[w])]
                only_itself = which == 0 and not path and len(found) == 1
                if not found or found == before or level == LEVELS or only_itself:
                    continue  # a shorter match that occurs at the same places says nothing new
                before = found
                total = len(going_on) if which == 0 else len(found)
                for token, count in naive_next(texts, context[-n:]):
                    cell = classify(which == 0, n, total, count)
                    chance = self.evidence[cell, 0] / self.evidence[cell, 1]
                    guesses[token] = max(guesses.get(token, 0.0), chance)
                level += total > 0
        return guesses


def paths(tree: TokenTree) -> list[tuple[tuple[int, ...], float]]:
    assert tree.weights is not None
    return [(tuple(tree.path_tokens(i)), float(tree.weights[i])) for i in range(1, len(tree))]


def small(capacity: int, depth: int) -> Suffix:
    """A drafter whose memory is far smaller than one may ask for."""
    drafter = Suffix(depth)
    drafter.capacity = capacity
    drafter.forget()
    return drafter


def record(tree: TokenTree, emitted: list[int]) -> StepRecord:
    return StepRecord(tree, Verdict((), 0), tuple(emitted), Scores(None))


requests = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=9), texts), min_size=1, max_size=6)


@given(requests, depths, st.integers(12, 60), st.integers(1, 9), st.integers(1, 9))
def test_proposals_equal_the_oracle_while_requests_come_and_go(requests, depth, capacity, nodes, deepest) -> None:
    drafter = small(capacity, depth)
    for prompt, steps in requests:
        history = History(prompt, SamplingParams(), 8)
        drafter.begin(0, history)
        for emitted in steps:
            halves = [[list(r) for r in past.requests] for past in drafter._past]
            oracle = Oracle(depth, history.tokens.tolist(), halves, drafter._evidence)
            want = oracle.propose(nodes, deepest)
            (tree,) = drafter.propose([0], [Budget(nodes, deepest)], [])
            assert tree.tokens[0] == history.tokens[-1] and tree.candidates == len(want)
            if want:
                assert [p for p, _ in paths(tree)] == [p for p, _ in want]
                np.testing.assert_allclose([w for _, w in paths(tree)], [w for _, w in want])
                assert drafter.confidence(0) > 0
            history.append(emitted)
            drafter.observe([0], [record(tree, emitted)])
        drafter.end(0)


@given(requests, st.integers(12, 60))
def test_the_oldest_requests_are_forgotten_first_and_whole(requests, capacity) -> None:
    drafter, finished = small(capacity, 4), []
    for prompt, steps in requests:
        history = History(prompt, SamplingParams(), 8)
        drafter.begin(0, history)
        history.append(output := list(chain(*steps)))
        drafter.end(0)
        finished.append([*prompt, *output][-min(len(output) + 4, capacity) :])
        held = drafter.memory()
        kept = [part.tolist() for part in np.split(held["tokens"], held["ends"][:-1])]
        assert kept == finished[-len(kept) :] and len(held["tokens"]) <= 2 * capacity
        assert len(kept) == len(finished) or len(held["tokens"]) > capacity - max(map(len, finished))


def test_weights_follow_what_became_text() -> None:
    """A loop that is never continued loses its weight, one that always is gains; both fall along a path."""
    for right in (False, True):
        drafter = Suffix(16)
        history = History([1, 2, 3] * 4, SamplingParams(), 100)
        drafter.begin(0, history)
        weights = []
        for _ in range(200):
            (tree,) = drafter.propose([0], [Budget(4, 4)], [])
            assert tree.weights is not None and (np.diff(tree.weights) < 0).all()
            weights.append(tree.weights[1])
            drafter.observe([0], [record(tree, [int(tree.tokens[1])] if right else [50])])
        assert (weights[-1] > weights[0]) == right
        assert weights[-1] > 0.97 if right else weights[-1] < 0.15


def test_loops_continue_as_loops_beyond_the_longest_match_that_counts() -> None:
    drafter = Suffix(max_depth=8)
    drafter.begin(0, History([9, *[1, 2, 3] * 20], SamplingParams(), 10))
    (tree,) = drafter.propose([0], [Budget(40, 40)], [])
    assert tree.is_chain and tree.tokens[1:].tolist() == ([1, 2, 3] * 20)[:40]


def test_a_request_that_outgrows_its_index_goes_on(monkeypatch) -> None:
    monkeypatch.setattr("outrider.draft.lookup.suffix._SPARE", 0)
    drafter, text = Suffix(8), np.random.default_rng(0).permutation(400).tolist()
    history = History(text[:3], SamplingParams(), 400)
    drafter.begin(0, history)
    for token in [*text[3:], *text[:5]]:
        history.append([token])
        drafter.observe([0], [record(root(0), [token])])
    (tree,) = drafter.propose([0], [Budget(6, 6)], [])
    assert tree.tokens[1:].tolist() == text[5:11]


def test_a_finished_request_serves_the_next_one_unless_private() -> None:
    answer = list(range(20, 60))
    for shared in (True, False):
        drafter = Suffix(shared=shared)
        for _ in range(2):
            history = History([1, 2, 3], SamplingParams(), 100)
            drafter.begin(0, history)
            (tree,) = drafter.propose([0], [Budget(16, 16)], [])
            history.append(answer)
            drafter.end(0)
        assert tree.tokens[1:].tolist() == (answer[:16] if shared else [])
        assert len(drafter.memory()["ends"]) == (2 if shared else 0)


def test_slots_do_not_see_each_other_before_they_end() -> None:
    drafter = Suffix()
    drafter.begin(0, History([1, 2, 3, 1, 2], SamplingParams(), 8))
    drafter.begin(1, History([1, 2, 7, 1, 2], SamplingParams(), 8))
    first, second = drafter.propose([0, 1], [Budget(1, 1)] * 2, [])
    assert (first.tokens[1], second.tokens[1]) == (3, 7)
    drafter.end(0)
    drafter.end(0)
    assert len(drafter.memory()["ends"]) == 0  # nothing was said: nothing to remember
    assert drafter.propose([1], [Budget(1, 1)], [])[0].tokens.tolist() == [2, 7]


@given(requests)
def test_memory_makes_an_equal_drafter(requests) -> None:
    drafter = small(40, 5)
    for prompt, steps in requests:
        history = History(prompt, SamplingParams(), 8)
        drafter.begin(0, history)
        for emitted in steps:
            (tree,) = drafter.propose([0], [Budget(6, 6)], [])
            history.append(emitted)
            drafter.observe([0], [record(tree, emitted)])
        drafter.end(0)
    copy = small(40, 5)
    copy.remember(drafter.memory())
    assert isinstance(copy, Remembers)
    for name, array in drafter.memory().items():
        np.testing.assert_array_equal(copy.memory()[name], array)
    prompt = [0, 1, 2, 3, 0, 1]
    for one in (drafter, copy):
        one.begin(0, History(prompt, SamplingParams(), 8))
    first, second = (one.propose([0], [Budget(9, 9)], [])[0] for one in (drafter, copy))
    assert first.tokens.tolist() == second.tokens.tolist() and first.parents.tolist() == second.parents.tolist()
    copy.forget()
    assert len(copy.memory()["tokens"]) == 0 and copy.propose([0], [Budget(1, 1)], [])[0].candidates


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([1, 2, 3])},
        {"tokens": np.array([-1, 2])},
        {"ends": np.array([2, 1, 2])},
        {"ends": np.array([[2]])},
        {"evidence": np.ones((3, 2))},
        {"evidence": np.zeros_like(first_guess())},
        {"tokens": np.array(["a", "b"])},
    ],
)
def test_a_memory_that_does_not_fit_is_refused_and_nothing_is_lost(change) -> None:
    drafter = Suffix()
    good = {"tokens": np.array([1, 2]), "ends": np.array([2]), "evidence": first_guess()}
    drafter.remember(good)
    with pytest.raises(InputError, match="suffix drafter"):
        drafter.remember(good | change)
    with pytest.raises(InputError, match="suffix drafter"):
        drafter.remember({"tokens": np.array([1])})
    assert drafter.memory()["tokens"].tolist() == [1, 2]


def test_a_batch_with_a_cancelled_request_leaves_whole_requests(tiny_llama) -> None:
    engine = Outrider(tiny_llama, "suffix", {"controller": "fixed", "budget": 4}, strict=True)
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7], [6, 7, 6, 7]]
    handles = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
    engine.step()
    engine.step()
    handles[1].cancel()
    outputs = [handle.results()[0].token_ids for handle in handles]
    assert 0 < len(outputs[1]) < 20
    drafter = engine.recipe().drafter
    assert isinstance(drafter, Suffix) and not drafter._slots
    held = drafter.memory()
    kept = [part.tolist() for part in np.split(held["tokens"], held["ends"][:-1])]
    assert sorted(kept) == sorted([*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True))


def test_memory_that_is_too_small_is_a_clear_error() -> None:
    with pytest.raises(InputError, match=f"memory_bytes is 1000, .* use {LEAST_BYTES} or more"):
        methods.find("suffix").build(None, methods.parse_options(methods.find("suffix"), {"memory_bytes": 1000}))
    with pytest.raises(InputError, match="max_depth is 1; use 2 or more"):
        Suffix(max_depth=1)
    assert Suffix(memory_bytes=LEAST_BYTES).capacity >= 1024


def test_the_memory_takes_no_more_bytes_than_given() -> None:
    given_bytes = 4 << 20
    drafter = Suffix(memory_bytes=given_bytes)
    for i in range(60):
        history = History([i], SamplingParams(), 1 << 20)
        drafter.begin(0, history)
        history.append(np.random.default_rng(i).integers(0, 1 << 20, 2000).tolist())
        drafter.end(0)
    used = sum(sum(a.nbytes for a in p.index.arrays) + sum(r.nbytes for r in p.requests) for p in drafter._past)
    assert used <= given_bytes + 1000
    assert 2000 < len(drafter.memory()["tokens"]) <= 2 * drafter.capacity
