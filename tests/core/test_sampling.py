"""Rows equal transformers' own processors, alone and chained; what transformers lacks is held to a plain oracle."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core.errors import EmptySupport, InputError
from outrider.core.sampling import History, SamplingParams
from outrider.core.target_rows import TargetRows
from outrider.core.tree import chain, from_paths, root
from outrider.core.warping import keep_min_p, keep_top_k, keep_top_p

V = 40
STOPS = frozenset({3, 7})
ids = st.integers(0, V - 1)
INF = math.inf


def logits_of(seed: int, size: int = V, spread: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def their_chain(p: SamplingParams, prompt: int, stops: frozenset[int]) -> tuple[LogitsProcessorList, ...]:
    """transformers' processors before and after the presence and frequency penalties, which it does not have."""
    first, rest = LogitsProcessorList(), LogitsProcessorList()
    if p.repetition_penalty != 1:
        first.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.logit_bias:
        rest.append(SequenceBiasLogitsProcessor({(i,): b for i, b in p.logit_bias.items()}))
    if p.bad_words:
        rest.append(NoBadWordsLogitsProcessor([list(w) for w in p.bad_words]))
    if p.min_new_tokens:
        rest.append(MinNewTokensLengthLogitsProcessor(prompt, p.min_new_tokens, sorted(stops), device="cpu"))
    if not p.greedy:
        rest.append(TemperatureLogitsWarper(p.temperature))
        rest.extend([TopKLogitsWarper(p.top_k)] if p.top_k else [])
        rest.extend([TopPLogitsWarper(p.top_p)] if p.top_p < 1 else [])
        rest.extend([MinPLogitsWarper(p.min_p)] if p.min_p else [])
    return first, rest


def their_row(p: SamplingParams, prompt: Sequence[int], said: Sequence[int], row: Tensor) -> Tensor:
    context = torch.tensor([[*prompt, *said]])
    first, rest = their_chain(p, len(prompt), STOPS)
    scores = first(context, row[None].clone())
    for token, count in Counter(said).items():
        scores[0, token] -= p.presence_penalty + p.frequency_penalty * count
    return rest(context, scores)[0]


def assert_same_row(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    assert torch.equal(torch.isinf(ours), torch.isinf(theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


words = st.lists(ids, min_size=1, max_size=3)
one_rule = st.one_of(
    st.builds(dict, temperature=st.floats(0.05, 5)),
    st.builds(dict, temperature=st.just(1.0), top_k=st.integers(0, 50)),
    st.builds(dict, temperature=st.just(1.0), top_p=st.floats(0.01, 1.0)),
    st.builds(dict, temperature=st.just(1.0), min_p=st.floats(0.0, 0.9)),
    st.builds(dict, repetition_penalty=st.floats(0.2, 3)),
    st.builds(dict, logit_bias=st.dictionaries(ids, st.floats(-20, 20), max_size=5)),
    st.builds(dict, bad_words=st.lists(words, max_size=6)),
    st.builds(dict, min_new_tokens=st.integers(0, 8)),
    st.builds(dict, presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2)),
)
all_rules = st.builds(
    dict,
    temperature=st.one_of(st.just(0.0), st.floats(0.3, 2)),
    top_k=st.one_of(st.just(0), st.integers(1, 50)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.5)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    logit_bias=st.dictionaries(ids, st.floats(-5, 5), max_size=4),
    bad_words=st.lists(words, max_size=4),
    min_new_tokens=st.integers(0, 8),
)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(one_rule, all_rules),
    st.lists(ids, min_size=1, max_size=12),
    st.lists(ids, max_size=6),
    st.lists(ids, max_size=4),
    st.integers(0, 2**31),
)
def test_rows_equal_transformers_processors(
    options: dict, prompt: list[int], output: list[int], path: list[int], seed: int
) -> None:
    params = SamplingParams(**options)
    row = logits_of(seed)
    before = row.clone()
    history = History(prompt, params, V, STOPS)
    history.append(output)
    ours = history.process(row, path)
    assert_same_row(ours, their_row(params, prompt, output + path, row))
    assert torch.equal(row, before), "the caller's row was written to"
    # a path that became text gives the very same bits: what a tree proposes cannot change the distribution
    history.append(path)
    assert torch.equal(history.process(row), ours)


def test_bad_words_match_across_prompt_output_and_path() -> None:
    params = SamplingParams(bad_words=[[1, 2, 3, 9], [3, 8], [5], [0, 1, 2, 3, 7]])
    history = History([1], params, V)
    history.append([2])
    banned = torch.isinf(history.process(logits_of(0), [3])).nonzero().flatten().tolist()
    assert banned == [5, 8, 9]
    assert torch.isinf(history.process(logits_of(0), [4])).nonzero().flatten().tolist() == [5]


def test_a_word_longer_than_the_context_matches_nothing() -> None:
    history = History([2], SamplingParams(bad_words=[[1, 2, 3], [2, 2, 4]]), V)
    assert not torch.isinf(history.process(logits_of(0))).any()


def test_minimum_length_counts_the_path() -> None:
    history = History([1, 2, 3], SamplingParams(min_new_tokens=3), V, STOPS)
    history.append([4])
    row = logits_of(1)
    assert torch.isinf(history.process(row, [5]))[[3, 7]].all()
    assert history.process(row, [5, 6]) is row


def test_each_branch_is_penalised_by_its_own_path() -> None:
    tree = from_paths(1, [[10, 11], [20, 21]])
    row = torch.ones(V)
    rows = TargetRows(row.expand(len(tree), V), tree, History([1], SamplingParams(frequency_penalty=1.0), V))
    left, right = tree.child(tree.child(0, 10), 11), tree.child(tree.child(0, 20), 21)
    for node, raised in ((left, {10, 11}), (right, {20, 21})):
        low = set((rows.logprobs(node)[1] < rows.logprobs(node)[1].max()).nonzero().flatten().tolist())
        assert low == raised
    assert rows.argmax(left) == 0 and rows.argmax(0) == 0


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not() -> None:
    row = torch.full((V,), 2.0)
    said = History([1, 1], SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), V)
    said.append([2, 2])
    assert said.process(row, [2, 3])[:5].tolist() == [2.0, 2.0, 2.0 - 2.5, 2.0 - 1.5, 2.0]
    seen = History([1, 1], SamplingParams(repetition_penalty=2.0), V)
    assert seen.process(row, [3])[:5].tolist() == [2.0, 1.0, 2.0, 1.0, 2.0]


def test_ids_beyond_the_vocabulary_are_no_crash() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=1.0, bad_words=[[1, 2]])
    history = History([1, V + 5], params, V, stop_ids=frozenset({V + 9}))
    history.append([V + 1])
    tree = chain(V + 1, [V + 2, 3])
    rows = TargetRows(logits_of(0).expand(3, V), tree, history)
    assert all(rows.probs(node).shape == (V,) for node in range(3))
    assert history.generated == 1 and history.tokens.tolist() == [1, V + 5, V + 1]


@pytest.mark.parametrize(
    "given",
    [{"stop_token_ids": [V]}, {"logit_bias": {V: 1.0}}, {"bad_words": [[1, V]]}, {"prediction": [V]}],
    ids=lambda given: next(iter(given)),
)
def test_asked_for_ids_outside_the_vocabulary_are_refused_with_the_range(given: dict) -> None:
    with pytest.raises(InputError, match=f"{next(iter(given))} names token id {V}: this model has the ids 0..{V - 1}"):
        History([1], SamplingParams(**given), V)


def test_order_bans_beat_bias_and_constraint_sees_penalised_logits_and_the_whole_context() -> None:
    calls = []

    class Watch:
        def reshape(self, tokens: np.ndarray, logits: Tensor) -> Tensor:
            calls.append((tokens.tolist(), logits.clone()))
            logits[0] = -INF  # in place: it may write to what it was handed
            return logits.double()

    params = SamplingParams(temperature=0.5, logit_bias={4: 50.0, 5: 1.0}, bad_words=[[4]], min_new_tokens=9)
    row = torch.zeros(V)
    history = History([1, 2], params, V, STOPS, Watch())
    history.append([6])
    out = history.process(row, [8])
    (tokens, seen), *_ = calls
    assert tokens == [1, 2, 6, 8] and seen[4] == -INF and seen[5] == 1.0 and (seen[[3, 7]] == -INF).all()
    assert out.dtype == torch.float32 and out[0] == -INF and out[5] == 2.0  # temperature comes after
    assert not row.any()


def test_an_empty_support_is_named() -> None:
    class Forbid:
        def reshape(self, tokens: np.ndarray, logits: Tensor) -> Tensor:
            return torch.full_like(logits, -INF)

    for params, constraint in (
        (SamplingParams(bad_words=[[i] for i in range(V)]), None),
        (SamplingParams(logit_bias=dict.fromkeys(range(V), -INF), temperature=1.0), None),
        (SamplingParams(), Forbid()),
    ):
        with pytest.raises(EmptySupport, match="loosen"):
            History([1], params, V, constraint=constraint).process(logits_of(0))
    with pytest.raises(EmptySupport):
        History([1], SamplingParams(min_new_tokens=1), 2, frozenset({0, 1})).process(torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"temperature": 1.0}, {"bad_words": [[1]]}])
def test_the_callers_logits_are_never_written_to(dtype: torch.dtype, options: dict) -> None:
    row = logits_of(0).to(dtype)
    before = row.clone()
    history = History([1, 2, 3], SamplingParams(**options), V)
    out = history.process(row, [4])
    history.draft_rows(row[None], [[4]], 8)
    assert torch.equal(row, before) and out.dtype == torch.float32


def test_nothing_to_do_returns_the_row_itself() -> None:
    row = logits_of(0)
    assert History([1], SamplingParams(top_k=5, top_p=0.5), V).process(row, [2]) is row  # greedy: argmax unaffected
    assert History([1], SamplingParams(temperature=1.0), V).process(row, [2]) is row


def test_top_k_keeps_all_that_equal_the_kth_as_transformers_does() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert keep_top_k(row, 2).isfinite().tolist() == [False, True, True, True, True, False]
    assert torch.equal(keep_top_k(row, 2), TopKLogitsWarper(2)(None, row[None])[0])


def test_top_p_keeps_the_crossing_token_and_the_lowest_ids_of_equals() -> None:
    even = torch.zeros(8)
    assert keep_top_p(even, 0.5).isfinite().tolist() == [True] * 4 + [False] * 4
    assert keep_top_p(even, 0.51).isfinite().tolist() == [True] * 5 + [False] * 3
    assert keep_top_p(even, 0.01).isfinite().tolist() == [True] + [False] * 7
    row = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1]).log()
    assert keep_top_p(row, 0.55).isfinite().tolist() == [False, True, True, False, False]
    assert keep_top_p(row, 0.75).isfinite().tolist() == [False, True, True, True, False]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_top_p_with_ties_keeps_as_many_of_each_value_as_transformers(levels: list[int], p: float) -> None:
    row = torch.tensor(levels, dtype=torch.float32)
    ours, theirs = keep_top_p(row, p), TopPLogitsWarper(p)(None, row[None])[0]
    before = row.sort(descending=True).values.double().softmax(0).cumsum(0)
    if (before - p).abs().min() > 1e-5:  # both sum in their own order; a sum that lands on p may go either way
        assert torch.equal(ours.sort().values, theirs.sort().values)
    kept = ours.isfinite()
    edge = ours[kept].min()
    assert (row[~kept] <= edge).all()
    tied = kept[row == edge].tolist()
    assert tied == sorted(tied, reverse=True), "the lowest ids stay"


@pytest.mark.parametrize("spread", [4.0, 0.05])  # a prefix reaches p, and one that must look at the whole row
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_on_a_real_vocabulary_equals_transformers(spread: float, p: float) -> None:
    row = logits_of(0, 20_000, spread)
    ours, theirs = keep_top_p(row, p), TopPLogitsWarper(p)(None, row[None])[0]
    # transformers adds 20,000 numbers in float32, so its own boundary is uncertain by about 1e-5 of the mass
    differ = ours.isfinite() != theirs.isfinite()
    assert row.softmax(0)[differ].sum() < 2e-5
    assert keep_top_p(ours, 1.0) is ours


def test_top_p_prefix_and_full_sort_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    row = logits_of(0, 2_000).round(decimals=1)  # many ties
    for p in np.linspace(0.05, 0.99, 20):
        short = keep_top_p(row, p)
        with monkeypatch.context() as patch:
            patch.setattr("outrider.core.warping._PREFIX", 2_000)
            assert torch.equal(keep_top_p(row, p), short)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_min_p(row, 0.2).isfinite().tolist() == [True, True, True, False]
    assert keep_min_p(row, 0.0) is row


@settings(max_examples=100, deadline=None)
@given(all_rules, st.lists(ids, max_size=4), st.integers(1, 60), st.integers(0, 2**31))
def test_a_draft_row_is_the_processed_distribution_cut_to_the_likeliest(
    options: dict, path: list[int], width: int, seed: int
) -> None:
    history = History([1, 2, 3], SamplingParams(**options), V, STOPS)
    (row,) = history.draft_rows(logits_of(seed)[None], [path], width)
    probs = history.process(logits_of(seed), path).double().softmax(0).numpy()
    order = np.lexsort((np.arange(V), -probs))[:width]
    order = order[probs[order] > 0]
    assert row.ids.dtype == np.int64 and row.probs.dtype == np.float64
    assert row.ids.tolist() == order.tolist()
    np.testing.assert_allclose(row.probs, probs[order] / probs[order].sum(), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(all_rules, st.lists(st.lists(ids, max_size=4), min_size=1, max_size=5), st.integers(1, 60), st.booleans())
def test_draft_rows_come_out_together_as_they_do_alone(options: dict, paths: list, width: int, ties: bool) -> None:
    history = History([1, 2, 3], SamplingParams(**options), V, STOPS)
    logits = torch.stack([logits_of(seed) for seed in range(len(paths))])
    logits = logits.round() if ties else logits
    together = history.draft_rows(logits, paths, width)
    for row, scores, path in zip(together, logits, paths, strict=True):
        (alone,) = history.draft_rows(scores[None], [path], width)
        assert row.ids.tolist() == alone.ids.tolist() and row.probs.tolist() == alone.probs.tolist()


def test_a_draft_row_breaks_ties_by_lower_id() -> None:
    history = History([1], SamplingParams(), 500)
    row = torch.zeros(500)
    row[[400, 20]] = 1.0
    assert history.draft_rows(row[None], [[]], 5)[0].ids.tolist() == [20, 400, 0, 1, 2]
    assert history.draft_rows(row[None], [[]], 1)[0].ids.tolist() == [20]


def test_draft_rows_of_another_width_propose_only_what_the_target_can_say() -> None:
    history = History([1], SamplingParams(logit_bias={V - 1: -1.0}), V)
    (wide,) = history.draft_rows(torch.arange(V + 10.0)[None], [[]], 4)
    assert wide.ids.tolist() == [V - 2, V - 1, V - 3, V - 4]  # the bias made two equal: the lower id first
    (narrow,) = history.draft_rows(torch.arange(V - 5.0)[None], [[]], 100)
    assert narrow.ids.max() == V - 6 and len(narrow.ids) == V - 5


def test_history_grows_in_place_and_its_view_is_prompt_and_output() -> None:
    history = History([5, 6], SamplingParams(), V)
    buffers = set()
    for i in range(300):
        history.append([i % V])
        buffers.add(id(history.tokens.base))
    assert history.tokens.dtype == np.int64 and history.tokens.tolist() == [5, 6, *(i % V for i in range(300))]
    assert len(buffers) < 10, "appending copies the whole history"
    assert list(history.prompt) == [5, 6] and len(history.output) == history.generated == 300


def test_target_rows_greedy_distribution_stands_on_the_argmax() -> None:
    logits = torch.stack([logits_of(i) for i in range(3)])
    logits[1, [4, 9]] = 99.0
    rows = TargetRows(logits, chain(1, [2, 3]), History([1], SamplingParams(), V))
    assert rows.greedy and [rows.argmax(i) for i in range(3)] == [int(r.argmax()) for r in logits]
    assert rows.argmax(1) == 4 and rows.probs(1)[4] == 1.0 and rows.probs(1).sum() == 1.0


def test_target_rows_sampled_distribution_sums_to_one_and_is_kept() -> None:
    logits = torch.stack([logits_of(i) for i in range(3)])
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    history = History([1], params, V)
    rows = TargetRows(logits, chain(1, [2, 3]), history)
    expected = history.process(logits[2], [2, 3])
    assert not rows.greedy and torch.equal(rows.probs(2), expected.softmax(0)) and rows.probs(2) is rows.probs(2)
    assert rows.argmax(2) == int(expected.argmax())
    raw, processed = rows.logprobs(2)
    assert torch.equal(raw, logits[2].log_softmax(0)) and torch.equal(processed, expected.log_softmax(0))


def test_greedy_log_probabilities_are_of_penalised_logits_at_temperature_one() -> None:
    history = History([1], SamplingParams(bad_words=[[2]], top_k=1), V)
    raw, processed = TargetRows(logits_of(0)[None], root(1), history).logprobs(0)
    assert processed[2] == -INF and raw[2].isfinite()
    rest = torch.arange(V) != 2
    torch.testing.assert_close(processed[rest], logits_of(0)[rest].log_softmax(0))
