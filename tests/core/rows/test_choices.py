"""What is chosen for all sequences of a step at once is what each would be told node by node, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.constrain.copy import CopyFrom
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import EmptySupport
from outrider.core.legal import Legal
from outrider.core.noise import VERIFY, StreamNoise, race_scores, target_keys
from outrider.core.numeric.picked import pick_score
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.rows import choices
from outrider.core.sampling import History
from outrider.core.target_rows import NONE_LEFT, TargetRows
from outrider.core.tree import TokenTree, fixed
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.runtime.slots import SlotTarget
from outrider.verify.invariant import Invariant
from tests.runtime.toy_backend import NGram, ToyBackend

VOCAB = 53
STOPS = frozenset({0, 4})
ids = st.integers(0, VOCAB - 1)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are chosen together here; the reference goes on as on a host."""
    monkeypatch.setattr(choices, "cheap_together", lambda _: True)


asked = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0])},
    optional={
        "top_k": st.integers(1, VOCAB + 5), "top_p": st.sampled_from([0.3, 0.7, 0.95]),
        "min_p": st.sampled_from([0.01, 0.2]), "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-0.5, 0.7]), "frequency_penalty": st.sampled_from([-0.2, 0.4]),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-np.inf, -3.0, 2.0]), max_size=4),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
        "allowed_ids": st.lists(ids, min_size=1, max_size=9).map(tuple),
        "min_new_tokens": st.integers(0, 6),
    },
)  # fmt: skip


def some_tree(rng: np.random.Generator, pending: int, rows: int) -> TokenTree:
    parents = [-1, *(int(rng.integers(i)) for i in range(1, rows))]
    tokens = rng.integers(VOCAB, size=rows)
    tokens[0] = pending
    return fixed(tokens, np.array(parents))


def some_step(
    given: Sequence[dict[str, Any]], seed: int, *, together: bool, copying: bool = False
) -> list[tuple[TargetRows, StreamNoise]]:
    """A sequence with each of these parameters, behind some text, with a tree of one to five rows."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 6)) for _ in given]
    scores = (3 * rng.standard_normal((sum(sizes) + 2, VOCAB))).astype(np.float32)
    scores[:, 10:14] = scores[:, 10:11]  # ties
    whole, first, step = torch.from_numpy(scores), 1, []
    for sample, (one, rows) in enumerate(zip(given, sizes, strict=True)):
        prompt = rng.integers(VOCAB, size=9).tolist()
        legal = Legal(CopyFrom(VOCAB), prompt, VOCAB, STOPS) if copying and sample % 2 else None
        history = History(prompt, SamplingParams(max_new_tokens=99, **one), VOCAB, STOPS, legal=legal)
        history.append(prompt[2:5] if legal is not None else rng.integers(VOCAB, size=3).tolist())
        tree = some_tree(rng, int(history.tokens[-1]), rows)
        logits = whole[first : first + rows]
        among = (whole, first) if together else None
        likeliest = logits.argmax(1).tolist() if sample % 3 else None
        noise = StreamNoise(seed, sample, VERIFY, history.hash, len(history.tokens))
        step.append((TargetRows(logits, tree, history, likeliest, among=among), noise))
        first += rows
    return step


def node_by_node(rows: TargetRows, noise: StreamNoise) -> list[int]:
    alone = TargetRows(rows.logits, rows.tree, rows.history, rows.likeliest)
    return [_said(alone, node, noise) for node in range(len(rows.tree))]


def _said(rows: TargetRows, node: int, noise: StreamNoise) -> int:
    try:
        return rows.argmax(node) if rows.greedy else rows.pick(node, rows.tree.path_tokens(node), noise)
    except EmptySupport:
        return NONE_LEFT


def check(step: Sequence[tuple[TargetRows, StreamNoise]]) -> None:
    want = [node_by_node(rows, noise) for rows, noise in step]
    choices.choose([(rows, noise, True) for rows, noise in step])
    for (rows, noise), tokens in zip(step, want, strict=True):
        if rows.chosen is None:
            assert rows.greedy and rows.likeliest is not None, "only what is known already is left out"
        assert [_said(rows, node, noise) for node in range(len(rows.tree))] == tokens


@settings(max_examples=250, deadline=None, derandomize=True)  # sums at the edge of top-p are rounded
@given(
    st.lists(asked, min_size=1, max_size=6), st.integers(0, 2**32), st.booleans(), st.sampled_from([1, 200, 1 << 24])
)
def test_all_at_once_is_node_by_node(given: list[dict[str, Any]], seed: int, together: bool, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "LIMIT", limit)
        check(some_step(given, seed, together=together))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(asked, min_size=2, max_size=5), st.integers(0, 2**32))
def test_masks_of_automata_count_for_their_own_rows(given: list[dict[str, Any]], seed: int) -> None:
    check(some_step(given, seed, together=True, copying=True))


def test_rows_are_read_where_they_lie_and_are_never_written_to() -> None:
    step = some_step([{"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0}}] * 4, 3, together=True)
    assert step[0][0].among is not None
    whole = step[0][0].among[0]
    before = whole.clone()
    check(step)
    assert torch.equal(whole, before)
    part = [rows for rows, _ in step]
    assert choices._gathered(part).data_ptr() == part[0].logits.data_ptr()
    apart = [part[0], part[2]]
    assert torch.equal(choices._gathered(apart), torch.cat([rows.logits for rows in apart]))


def test_rules_that_are_coupled_to_the_draft_are_asked_nothing_before() -> None:
    step = some_step([{"temperature": 1.0}, {"temperature": 0.0, "logit_bias": {3: 9.0}}], 5, together=True)
    choices.choose([(rows, noise, False) for rows, noise in step])
    assert step[0][0].chosen is None and step[1][0].chosen is not None


@pytest.mark.parametrize(("temperature", "asked_for"), [(1.0, "masks"), (0.0, "masks"), (0.0, "allows")])
def test_an_automaton_that_fails_is_left_to_its_own_request(
    temperature: float, asked_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [{"temperature": temperature, "presence_penalty": 0.1 * (asked_for == "masks")}] * 6
    step = some_step(given, 5, together=True, copying=True)
    broken = step[1][0].history.legal
    assert broken is not None and step[1][0].likeliest is not None
    monkeypatch.setattr(broken, asked_for, lambda *_: 1 / 0)
    choices.choose([(rows, noise, True) for rows, noise in step])
    assert step[1][0].chosen is None and step[3][0].chosen is not None


@given(st.integers(0, 2**32), st.sampled_from([1e-5, 0.1, 0.7, 1.0, 3.0]), st.sampled_from([0.1, 1.0, 30.0]))
@settings(max_examples=100, deadline=None)
def test_the_race_by_logarithms_is_the_race_over_scores(seed: int, temperature: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    scores = (spread * rng.standard_normal((4, 999))).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[:, 7] = 0.0
    keys = rng.integers(0, 1 << 64, 4, dtype=np.uint64)
    given = torch.full((4,), temperature, dtype=torch.float64)
    said = race_scores(torch.from_numpy(scores), given, torch.from_numpy(keys.view(np.int64)))
    assert said.tolist() == [int(pick_score(row, temperature, key)) for row, key in zip(scores, keys, strict=True)]


@given(st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_keys_of_all_nodes_are_those_of_their_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [some_tree(rng, 3, int(rng.integers(1, 12))) for _ in range(5)]
    noises = [StreamNoise(seed, i % 2, VERIFY, int(rng.integers(1 << 63)) * 2 + 1, 7 * i) for i in range(5)]
    want = [n.target_key(tree.path_tokens(i)) for n, tree in zip(noises, trees, strict=True) for i in range(len(tree))]
    assert target_keys(noises, trees).tolist() == want


# Through the engine

PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [9, 8, 7], [5], [2, 2]]
ASKED: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "min_new_tokens": 9},
    {"temperature": 0.0, "repetition_penalty": 1.4}, {"temperature": 1.2, "frequency_penalty": 0.5, "top_k": 9},
]  # fmt: skip


def said(together: bool, monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> Iterator[list[int]]:
    with monkeypatch.context() as patch:
        patch.setattr(choices, "cheap_together", lambda _: together)
        if together:  # nothing is left to be done row by row
            patch.setattr(History, "process", lambda *_: pytest.fail("a row was processed by itself"))
        target = SlotTarget(ToyBackend(NGram(VOCAB, back=2)), max_slots=4, max_rows=16)
        engine = Engine(target, recipe, eos_ids=STOPS, strict=True)
        given = [SamplingParams(max_new_tokens=30, seed=3, **one) for one in ASKED]
        handles = [engine.submit(prompt, one) for prompt, one in zip(PROMPTS, given, strict=True)]
        for handle in handles:
            yield handle.result().token_ids


@pytest.mark.parametrize("nodes", [0, 6])
def test_a_batch_says_the_same_and_no_row_is_processed_by_itself(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for together in (True, False):
        recipe = Recipe("copies", PromptLookup() if nodes else None, Invariant(), Fixed(Budget(nodes, nodes)))
        found.append(list(said(together, monkeypatch, recipe)))
    assert found[0] == found[1]
