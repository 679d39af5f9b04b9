"""ADED: the table is what counting gives, the search is PUCT, the trie is its ranking, and text stays the target's."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.api import Outrider
from outrider.check.toy import ToyLM
from outrider.core.errors import InputError
from outrider.core.records import Budget, Needs, Scores, StepRecord, Verdict
from outrider.core.tree import root
from outrider.draft.table.aded import CAP, GAIN, SUCCESSORS, WINDOW, Aded, corpus_table
from outrider.draft.table.odds import new_odds
from outrider.draft.table.puct import Settings, most_visited, search
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from tests.draft.greedy import as_plain
from tests.draft.toy_loop import distribution_gap, history, spelled

V = 30
SMALL = 1 << 20


def aded(vocab_size: int = V, **options) -> Aded:
    return Aded(vocab_size, **{"memory_bytes": SMALL, **options})


def weights(drafter: Aded) -> dict[tuple[int, int], dict[int, float]]:
    """Everybody's table as dictionaries."""
    stored = drafter.memory()
    return {
        (int(key[1] >> 32) - 1, int(key[1] & 0xFFFFFFFF) - 1): {
            int(token): float(value) for token, value in zip(ids, values, strict=True) if token >= 0
        }
        for key, ids, values in zip(stored["keys"], stored["ids"], stored["values"], strict=True)
    }


def with_distributions(pairs: dict[tuple[int, int], dict[int, float]], vocab_size: int = V, **options) -> Aded:
    """A drafter whose table is this."""
    drafter = aded(vocab_size, **options)
    arrays = drafter.memory()
    ids, values = np.full((len(pairs), SUCCESSORS), -1, np.int32), np.zeros((len(pairs), SUCCESSORS), np.float32)
    for row, values_of in enumerate(pairs.values()):
        best = sorted(values_of, key=lambda token: -values_of[token])
        ids[row, : len(values_of)], values[row, : len(values_of)] = best, [values_of[token] for token in best]
    keys = np.array([(0, (a + 1) << 32 | (b + 1)) for a, b in pairs], np.int64)
    drafter.remember({**arrays, "keys": keys, "ids": ids, "values": values, "counts": np.ones(len(pairs), np.int32)})
    return drafter


@given(st.integers(0, 10_000), st.integers(3, 400), st.sampled_from([3, V]))
def test_a_corpus_table_equals_counting(seed: int, length: int, vocab_size: int) -> None:
    tokens = np.random.default_rng(seed).zipf(1.3, length) % vocab_size
    drafter = aded(vocab_size, corpus=corpus_table(tokens, vocab_size))
    counts: dict[tuple[int, int], Counter[int]] = {}
    for a, b, c in zip(*(tokens[i:].tolist() for i in range(3)), strict=False):
        counts.setdefault((a, b), Counter())[c] += 1
    found = weights(drafter)
    assert found.keys() == counts.keys()
    for pair, counted in counts.items():
        kept = sorted(counted, key=lambda token: (-counted[token], token))[:SUCCESSORS]
        assert list(found[pair]) == kept
        assert list(found[pair].values()) == pytest.approx(
            [counted[token] / counted.total() for token in kept], rel=1e-5
        )


def observed(drafter: Aded, past, *tokens: int) -> None:
    tree = root(int(past.tokens[-1]))
    past.append(tokens)
    drafter.observe([0], [StepRecord(tree, Verdict((), tokens[-1]), tokens, Scores(None))])


def test_only_the_last_sixteen_tokens_are_raised_and_never_above_the_cap() -> None:
    drafter = aded(64, learn_prompt=False)
    text = list(range(40))
    drafter.begin(0, past := history(text, 64))
    observed(drafter, past, 40)
    window = [*text, 40][-WINDOW:]
    want = {(a, b): {c: pytest.approx(GAIN)} for a, b, c in zip(window, window[1:], window[2:], strict=False)}
    assert weights(drafter) == want
    for _ in range(200):
        observed(drafter, past, *[1, 2, 3] * 8)
    assert max(value for successors in weights(drafter).values() for value in successors.values()) == pytest.approx(CAP)


def test_a_full_row_keeps_twelve_and_a_newcomer_takes_the_least_ones_place() -> None:
    drafter = aded(64)
    drafter.begin(0, history([t for c in range(SUCCESSORS) for t in (50, 51, c)], 64))
    assert len(weights(drafter)[50, 51]) == SUCCESSORS
    drafter.begin(0, history([50, 51, 60], 64))
    successors = weights(drafter)[50, 51]
    assert len(successors) == SUCCESSORS and next(iter(successors)) == 60 and 0 not in successors
    heavy = with_distributions({(50, 51): dict.fromkeys(range(SUCCESSORS), 1.0)}, 64)
    heavy.begin(0, history([50, 51, 60], 64))
    assert 60 not in weights(heavy)[50, 51]


# the search


def searched(drafter: Aded, settings: Settings, pair=(0, 1), seed: int = 1):
    return search(drafter._table, 0, *pair, settings, seed)


def children(found, node: int = 0) -> range:
    return range(found.firsts[node], found.firsts[node] + max(found.counts[node], 0))


def test_every_child_is_tried_before_one_is_tried_again() -> None:
    drafter = with_distributions({(0, 1): {c: 1.0 / (c + 1) for c in range(10)}})
    for iterations in range(1, 11):
        found = searched(drafter, Settings(iterations))
        assert [found.visits[c] for c in children(found)] == [1] * iterations + [0] * (10 - iterations)


def test_a_concentrated_weight_gets_most_visits() -> None:
    found = searched(with_distributions({(0, 1): {5: 0.9, 6: 0.04, 7: 0.03, 8: 0.03}}), Settings())
    visits = [found.visits[c] for c in children(found)]
    assert visits[0] / sum(visits) > 0.5


def test_without_exploration_the_best_mean_reward_is_stayed_with() -> None:
    pairs = {(0, 1): {5: 0.3, 6: 0.2, 7: 0.1}, (1, 6): {9: 2.5}, (1, 5): {9: 0.1}, (1, 7): {9: 0.1}}
    found = searched(with_distributions(pairs), Settings(60, c1=0.0, c2=1e18))
    visits = {int(found.tokens[c]): int(found.visits[c]) for c in children(found)}
    assert visits == {5: 1, 6: 58, 7: 1}


@given(st.integers(0, 10_000))
def test_visits_never_rise_along_a_path_and_iterations_all_pass_the_root(seed: int) -> None:
    drafter = random_table(seed)
    found = searched(drafter, Settings())
    assert found.visits[0] == 150
    assert all(found.visits[node] <= found.visits[found.parents[node]] for node in range(1, len(found.tokens)))
    assert found.levels.max() <= 4


def random_table(seed: int, vocab_size: int = 4, missing: float = 0.3) -> Aded:
    source = np.random.default_rng(seed)
    pairs = {}
    for a in range(vocab_size):
        for b in range(vocab_size):
            if source.random() > missing or (a, b) == (0, 1):
                known = source.permutation(vocab_size)[: int(source.integers(1, vocab_size + 1))]
                pairs[a, b] = dict(zip(known.tolist(), source.dirichlet(np.ones(len(known))).tolist(), strict=True))
    return with_distributions(pairs, vocab_size)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 4))
def test_the_trie_is_the_ranking_of_all_prefixes_with_their_likeliest_ends(seed: int, nodes: int, depth: int) -> None:
    drafter = random_table(seed)
    table = weights(drafter)
    found = searched(drafter, Settings(2000))
    tokens, parents, values = most_visited(drafter._table, 0, new_odds(1), found, nodes, depth)
    spelt = {0: ()}
    for node in sorted(range(1, len(found.tokens)), key=lambda n: n):
        spelt[node] = (*spelt[int(found.parents[node])], int(found.tokens[node]))
    want: list[tuple[int, ...]] = []
    for node in sorted(spelt, key=lambda n: (-found.visits[n], n)):
        prefix = spelt[node]
        before, last = (0, 1, *prefix)[-2:]
        end = (*prefix, next(iter(table[before, last]))) if (before, last) in table else None
        for path in (prefix, end):
            if found.visits[node] and path and path not in want and len(path) <= depth and len(want) < nodes:
                want.append(path)
    got = {}
    for node in range(1, len(tokens)):
        got[node] = (*got.get(int(parents[node]), ()), int(tokens[node]))
    assert list(got.values()) == want
    assert (values[1:] <= values[parents[1:]]).all()


def test_the_two_rewards_differ_as_described() -> None:
    """Intended: the weights along the state. As published: of the token that each pair ends with, once more."""
    pairs = {(0, 1): {2: 0.5}, (1, 2): {3: 0.25}, (2, 3): {4: 0.125}}
    found = searched(with_distributions(pairs), Settings(1))
    assert found.rewards[0] == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    found = searched(with_distributions(pairs), Settings(1, as_published=True))
    assert found.rewards[0] == pytest.approx(1.0)
    found = searched(with_distributions({(0, 1): {1: 0.5}, (1, 1): {1: 0.25}}), Settings(1, as_published=True))
    assert found.rewards[0] == pytest.approx(1 + 0.5 + 0.25 + 0.25)


def test_an_unknown_pair_proposes_nothing_and_a_dead_end_ends_the_state() -> None:
    drafter = with_distributions({(0, 1): {2: 1.0}})
    for text, want in (([0, 1], {(2,)}), ([3, 4], set()), ([1], set())):
        drafter.learn_prompt = False
        drafter.begin(0, history(text, V))
        (tree,) = drafter.propose([0], [Budget(8, 4)], [None])
        assert spelled(tree) == want


def test_accepted_length_rises_on_a_repeated_phrase_and_stays_flat_without_adapting() -> None:
    phrase = [3, 1, 4, 1, 5, 9, 2, 6]
    gains = {}
    for adapt in (True, False):
        drafter = aded(adapt=adapt, learn_prompt=False)
        drafter.begin(0, past := history(phrase[:2], V))
        text, steps = phrase * 20, []
        while len(past.tokens) < 120:
            at = len(past.tokens)
            (tree,) = drafter.propose([0], [Budget(8, 4)], [None])
            node, said = 0, []
            while (child := tree.child(node, text[at + len(said)])) > 0:
                said.append(text[at + len(said)])
                node = child
            observed(drafter, past, *said, text[at + len(said)])
            steps.append(len(said) + 1)
        gains[adapt] = steps
    assert np.mean(gains[True][:6]) == 1.0 and np.mean(gains[True][-6:]) == 5.0  # four deep, and the target's own
    assert set(gains[False]) == {1}


# exact, bounded, private


@pytest.mark.parametrize("verifier", [Invariant(), Recursive()], ids=lambda v: v.name)
@pytest.mark.parametrize("start", ["empty", "wrong"])
def test_generated_text_has_the_targets_distribution(verifier, start: str) -> None:
    make = (lambda: aded(3)) if start == "empty" else (lambda: random_table(7, 3, missing=0.0))
    assert distribution_gap(make, verifier, Budget(3, 2), ToyLM(3, seed=11)) < 1e-6


@pytest.mark.parametrize("options", [{}, {"scope": "private"}, {"reward": "as_published"}], ids=str)
def test_greedy_text_is_plains_from_any_state_alone_and_in_a_batch(tiny_llama, options: dict) -> None:
    engine = Outrider(tiny_llama, "plain", strict=True)
    recipe = engine.recipe("aded", {"controller": "fixed", **options})
    for _ in range(2):
        together = as_plain(engine, recipe)
    alone = as_plain(engine, recipe, batch=False)
    if options.get("scope") == "private":
        assert [g.stats.steps for g in alone] == [g.stats.steps for g in together]
        assert len(recipe.drafter.memory()["keys"]) == 0
    else:
        assert sum(g.stats.steps for g in alone) < 0.5 * sum(len(g.token_ids) for g in alone)


def test_a_private_request_raises_copies_of_its_own() -> None:
    drafter = with_distributions({(0, 1): {2: 0.5, 3: 0.4}}, scope="private")
    drafter.begin(0, past := history([0, 1], V))
    for _ in range(3):
        observed(drafter, past, 3, 0, 1)
    drafter.begin(1, history([0, 1], V))
    private, other = drafter.propose([0, 1], [Budget(1, 1)] * 2, [None] * 2)
    assert (spelled(private), spelled(other)) == ({(3,)}, {(2,)})
    assert weights(drafter) == {(0, 1): {2: pytest.approx(0.5), 3: pytest.approx(0.4)}}


def test_memory_goes_round_stays_bounded_and_foreign_arrays_are_refused() -> None:
    drafter = random_table(3)
    good = drafter.memory()
    copy = aded(4)
    copy.remember(good)
    assert all(np.array_equal(copy.memory()[name], good[name]) for name in good)
    for arrays in ({}, {**good, "ids": good["ids"][:, :5]}, {**good, "values": good["values"] + 9}):
        with pytest.raises(InputError):
            copy.remember(arrays)
    assert weights(copy) == weights(drafter)
    copy.forget()
    assert weights(copy) == {}
    based = aded(corpus=corpus_table(np.array([1, 2, 3]), V))
    based.begin(0, history([5, 6, 7], V))
    based.forget()
    assert weights(based) == {(1, 2): {3: 1.0}}  # as new: with its corpus
    with pytest.raises(InputError, match="the least that works is"):
        aded(memory_bytes=100)
    full = aded(5000, memory_bytes=300_000)
    full.begin(0, history(np.random.default_rng(0).integers(0, 5000, 9000).tolist(), 5000))
    assert full.nbytes <= 300_000 and len(full.memory()["keys"]) == len(full._table.keys)
    assert full.needs == Needs()


def test_a_corpus_file_starts_the_table_and_a_bad_one_is_named(tiny_llama, smollm2, tmp_path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("the cat sat on the mat and the cat sat on the hat\n" * 3, encoding="utf-8")
    engine = Outrider(smollm2, "plain", limits={"max_slots": 1, "max_context": 64})
    drafter = engine.recipe("aded", {"corpus": str(file)}).drafter
    drafter.begin(0, history(engine.encode("the cat sat on"), smollm2.model.config.vocab_size))
    (tree,) = drafter.propose([0], [Budget(2, 2)], [None])
    assert engine.tokenizer.decode(tree.path_tokens(1)) == " the"
    with pytest.raises(InputError, match="cannot be read"):
        engine.recipe("aded", {"corpus": str(tmp_path / "none.txt")})
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa" * 20)
    with pytest.raises(InputError, match="not UTF-8"):
        engine.recipe("aded", {"corpus": str(tmp_path / "bytes.txt")})
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="0 tokens"):
        engine.recipe("aded", {"corpus": str(tmp_path / "empty.txt")})
    with pytest.raises(InputError, match="needs a tokenizer"):
        Outrider(tiny_llama, "plain").recipe("aded", {"corpus": str(file)})
