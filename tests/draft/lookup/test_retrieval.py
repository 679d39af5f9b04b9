"""Retrieval drafts what a naive reading of the corpus would: the best nodes of the trie, weights from count ratios."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe, Remembers
from outrider.core.records import Budget, Scores, StepRecord, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.tree import TokenTree, root
from outrider.draft.lookup.retrieval import COUNTS, LENGTHS, Retrieval
from outrider.runtime.targets import eager_target
from outrider.store.store import Store
from outrider.verify.invariant import Invariant
from tests.store.conftest import make_store

V = 4
documents = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=30), min_size=1, max_size=4)
corpora = st.lists(documents, min_size=1, max_size=2)
contexts = st.lists(st.integers(0, V - 1), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def sure(drafter: Retrieval) -> Retrieval:
    """Full trust: what is left are the ratios of counts."""
    drafter._hits[:] = drafter._tries
    return drafter


def step(drafter: Retrieval, tokens, budget=Budget(8, 4), slot=0) -> TokenTree:
    drafter.begin(slot, SimpleNamespace(tokens=np.array(tokens, dtype=np.int64)))
    return drafter.propose([slot], [budget], [None])[0]


def occurrences(shards, query) -> list[list[int]]:
    n = len(query)
    return [d[i + n :] for shard in shards for d in shard for i in range(len(d) - n + 1) if d[i : i + n] == query]


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.path_tokens(i)): float(tree.weights[i]) for i in range(1, len(tree))}


def bucket(length: int, count: int) -> tuple[int, int]:
    long = length if length < 8 else 8 + (length - 8) // 8
    return min(long, LENGTHS - 1), min(count.bit_length() - 1, COUNTS - 1)


def naive(drafter: Retrieval, shards, context, depth) -> dict[tuple[int, ...], float]:
    """Every path of the trie with its weight, from the definition."""
    n = max(n for n in range(len(context) + 1) if n == 0 or occurrences(shards, context[-n:]))
    levels = []
    while n >= drafter.shortest:
        levels.append((n, occurrences(shards, context[-n:])))
        if len(levels[-1][1]) >= drafter.enough or len(levels) == 3 or n // 2 < drafter.shortest:
            break
        n //= 2
    trust = drafter._hits / drafter._tries
    rows, left = [], 1.0
    for n, found in levels:
        share = trust[bucket(n, len(found))]
        rows += [(tuple(row[:depth]), n, left * share / len(found)) for row in found]
        left *= 1 - share
    weights: dict[tuple[int, ...], float] = {}

    def expand(path, alive, weight) -> None:
        d = len(path)
        total = sum(share for _, _, share in alive)
        scale = 1.0 if d == 0 else weight / total * trust[bucket(max(n for _, n, _ in alive) + d, len(alive))]
        going = sorted((row for row in alive if len(row[0]) > d), key=lambda row: row[0][d])
        for token, group in groupby(going, key=lambda row: row[0][d]):
            rows = list(group)
            child = (*path, token)
            weights[child] = sum(share for _, _, share in rows) * scale
            if len(child) < depth:
                expand(child, rows, weights[child])

    if rows:
        expand((), rows, 1.0)
    return weights


@given(shards=corpora, context=contexts, budget=st.integers(1, 12), depth=st.integers(1, 4), enough=st.integers(1, 9))
def test_the_tree_is_the_best_part_of_the_trie(folder, shards, context, budget, depth, enough) -> None:
    drafter = Retrieval(make_store(folder, shards, V), enough=enough, shortest=1, floor=0.0)
    tree = step(drafter, context, Budget(budget, depth))
    every = {path: weight for path, weight in naive(drafter, shards, context, depth).items() if weight > 0}
    got = paths(tree) if tree.candidates else {}
    for path, weight in got.items():
        assert weight == pytest.approx(every[path])
    best = sorted(every.values(), reverse=True)[:budget]
    assert sorted(got.values(), reverse=True) == pytest.approx(best)
    if got:
        assert (np.diff(tree.weights) <= 1e-12).all()  # best first, so any prefix is a tree too


@given(shards=corpora, context=contexts)
def test_with_full_trust_weights_are_products_of_count_ratios(folder, shards, context) -> None:
    drafter = sure(Retrieval(make_store(folder, shards, V), shortest=1, floor=0.0))
    tree = step(drafter, context, Budget(50, 3))
    length = max(n for n in range(len(context) + 1) if n == 0 or occurrences(shards, context[-n:]))
    found = occurrences(shards, context[len(context) - length :]) if length else []
    expected: dict[tuple[int, ...], float] = {}
    for row in found:
        for d in range(1, min(len(row), 3) + 1):
            expected[tuple(row[:d])] = expected.get(tuple(row[:d]), 0.0) + 1 / len(found)
    assert (paths(tree) if tree.candidates else {}) == pytest.approx(expected)


def test_candidates_below_the_floor_and_beyond_a_document_are_not_proposed(make_it) -> None:
    store = make_it([[[1, 2, 0], [1, 2, 3]] + [[1, 2, 1]] * 98])
    tree = step(sure(Retrieval(store, floor=0.02)), [1, 2])
    assert paths(tree) == pytest.approx({(1,): 0.98})
    assert step(sure(Retrieval(make_it([[[1, 2], [3]]]))), [1, 2]).candidates == 0


@pytest.fixture
def make_it(tmp_path):
    count = iter(range(99))
    return lambda shards, vocabulary=V: make_store(tmp_path / str(next(count)), shards, vocabulary)


def test_a_short_match_fills_in_where_the_long_one_is_rare(make_it) -> None:
    store = make_it([[[0, 0, 1, 2, 3, 3], *([[1, 2, 1]] * 9)]])
    drafter = Retrieval(store, enough=2)
    tree = step(drafter, [0, 0, 1, 2], Budget(4, 2))
    got = paths(tree)
    assert {(3,), (3, 3), (1,)} == set(got) and got[3,] > got[1,]
    assert set(paths(step(Retrieval(store, enough=1), [0, 0, 1, 2], Budget(4, 2)))) == {(3,), (3, 3)}


def test_the_search_goes_on_from_the_last_step_and_finds_the_same(make_it, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    store = make_it([[rng.integers(0, V, 400).tolist()], [rng.integers(0, V, 200).tolist()]])
    text = rng.integers(0, V, 40).tolist() + store.shards[0].tokens[50:120].tolist()
    searches = []
    monkeypatch.setattr(Store, "longest", lambda self, c, longest=Store.longest: searches.append(1) or longest(self, c))
    drafter, context = Retrieval(store), SimpleNamespace(tokens=np.array(text[:5]))
    drafter.begin(0, context)
    for end in [5, 6, 9, 10, 30, *range(31, len(text), 2)]:
        context.tokens = np.array(text[:end])
        before = len(searches)
        tree = drafter.propose([0], [Budget(16, 8)], [None])[0]
        drafter.propose([0], [Budget(16, 8)], [None])  # again without a new token
        assert len(searches) - before <= (end < 60)  # 20 tokens into the copy, every step extends the last one
        fresh = step(Retrieval(store, look_back=1000), text[:end], Budget(16, 8), slot=1)
        assert (tree.tokens.tolist(), tree.parents.tolist()) == (fresh.tokens.tolist(), fresh.parents.tolist())


def record(tree: TokenTree, emitted) -> StepRecord:
    return StepRecord(tree, Verdict((), 0), tuple(emitted), Scores(None))


def test_trust_follows_what_is_accepted_by_length_and_count_of_the_match(make_it) -> None:
    store = make_it([[[0, 1, 2, 3, 3, 3], [2, 2, 1, 1]]])
    drafter = Retrieval(store, shortest=1, enough=1)
    first = drafter.memory()
    for _ in range(60):
        tree = step(drafter, [0, 1], Budget(4, 4))
        drafter.observe([0], [record(tree, [2, 3, 0])])
        tree = step(drafter, [1, 2, 2], Budget(4, 4))
        drafter.observe([0], [record(tree, [0])])
    rate = drafter._hits / drafter._tries
    assert rate[2, 0] == pytest.approx(0.5, abs=0.1)  # [0, 1] went on as found, [2, 2] never did
    assert rate[3, 0] > 0.9  # [0, 1, 2] -> 3
    assert rate[4, 0] < 0.2  # [0, 1, 2, 3] -> 0 instead of 3
    untouched = np.ones_like(rate, dtype=bool)
    untouched[[2, 3, 4], 0] = False
    assert (drafter._hits[untouched] == first["hits"][untouched]).all()


def test_memory_round_trips_and_what_is_none_is_refused(make_it) -> None:
    drafter = Retrieval(make_it([[[0, 1, 2]]]))
    assert isinstance(drafter, Remembers)
    fresh = drafter.memory()
    drafter.observe([0], [record(step(drafter, [0, 1]), [2])])
    kept = drafter.memory()
    assert (kept["hits"] != fresh["hits"]).any()
    other = Retrieval(drafter.corpus)
    other.remember(kept)
    assert (other.memory()["hits"] == kept["hits"]).all()
    other.forget()
    assert (other.memory()["hits"] == fresh["hits"]).all()
    for bad in ({}, {"hits": np.ones(3), "tries": np.ones(3)}, {**kept, "tries": np.zeros((LENGTHS, COUNTS))}):
        with pytest.raises(InputError, match="start without it"):
            other.remember(bad)


def test_no_budget_or_no_store_proposes_nothing(make_it) -> None:
    assert step(Retrieval(Store()), [1, 2, 3]).candidates == 0
    drafter = Retrieval(make_it([[[1, 2, 3]]]))
    assert step(drafter, [1, 2], Budget(0, 0)).candidates == 0
    drafter.observe([0], [record(root(2), [3])])


def test_text_that_is_in_the_corpus_is_accepted_at_length(tiny_llama, make_it) -> None:
    """The corpus is what the target will say: nearly every candidate is accepted, and the text is plain's."""
    target = tiny_llama.model
    plain = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    engine = Engine(eager_target(target, max_slots=4), plain, strict=True)
    prompts, params = [[1, 5, 9], [7, 7], [30, 4, 4, 4]], SamplingParams(max_new_tokens=40)
    texts = [engine.submit(p, params, plain).result().token_ids for p in prompts]
    store = make_it([[p + t for p, t in zip(prompts[:2], texts, strict=False)], [prompts[2] + texts[2]]], 64)
    recipe = Recipe("retrieval", Retrieval(store, shortest=1), Invariant(), Fixed(Budget(12, 8)))
    handles = [engine.submit(p, params, recipe) for p in prompts]
    results = [handle.result() for handle in handles]
    assert [r.token_ids for r in results] == texts
    assert np.mean([r.stats.mean_accepted for r in results]) > 4
    assert {o.drafter for r in results for o in r.origins if o.depth} == {"retrieval"}


def test_the_methods_take_a_store_of_the_targets_own_ids_only(tiny_llama, make_it, tmp_path, caplog) -> None:
    from outrider.api import Outrider

    engine = Outrider(tiny_llama, "plain", strict=True)
    fits, large = make_it([[[1, 2, 3]]], 64), make_it([[[1, 2, 3]]], 65)
    for method in ("retrieval", "rasd"):
        assert engine.recipe(method, {"store": str(fits.shards[0].path.parent)}).name == method
        with pytest.raises(InputError, match="has ids up to 65"):
            engine.recipe(method, {"store": str(large.shards[0].path.parent)})
        with pytest.raises(InputError, match="outrider index build"):
            engine.recipe(method, {"store": str(tmp_path / "nothing")})
    manifest = large.shards[0].path.with_name("store.json")
    manifest.write_text(manifest.read_text().replace("token ids", "0123456789abcdef"))
    with pytest.raises(InputError, match="built with the tokenizer of 'ids'"):
        engine.recipe("retrieval", {"store": str(manifest.parent)})


def test_without_a_store_one_warning_says_how_to_build_one(tiny_llama, caplog) -> None:
    from outrider.api import Outrider
    from outrider.methods import retrieval

    retrieval._say_once.cache_clear()
    engine = Outrider(tiny_llama, "plain", strict=True)
    for _ in range(2):
        engine.recipe("retrieval", {"budget": 8})
    engine.recipe("rasd")
    assert caplog.text.count("outrider index build --corpus") == 1


def test_the_tokenizer_of_a_model_is_loaded_without_its_weights(smollm2, monkeypatch) -> None:
    from outrider.models import load_tokenizer
    from outrider.store.tokens import encoder, fingerprint

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    tokenizer = load_tokenizer("smollm2")
    assert fingerprint(tokenizer) == fingerprint(smollm2.tokenizer)
    assert encoder(tokenizer)(["def f(x):"])[0] == smollm2.tokenizer.encode("def f(x):", add_special_tokens=False)
    with pytest.raises(InputError):
        load_tokenizer("./no/such/folder")
