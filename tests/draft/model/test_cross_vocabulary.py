"""Drafting through text: bytes survive every translation, the draft's view of the text is that of a fresh encoding,
a draft that knows the text is accepted whole, and the output keeps the target's distribution."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.check.enumeration import Branches
from outrider.check.exhaustive import CONTEXT, TOLERANCE, distance, step_distribution
from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import run_all
from outrider.core.tree import NOTHING, Draw, QRow, TokenTree
from outrider.draft.model import cross_vocabulary
from outrider.draft.model.cross_vocabulary import CrossVocabulary, CrossVocabularyDrafter
from outrider.draft.model.mirror import Mirror
from outrider.draft.model.ngram_cache import NgramCache, cache_for, pack, translate
from outrider.draft.model.vocabulary_map import VocabularyMap
from outrider.grow.chain import Chain
from outrider.grow.kary import KAry
from outrider.verify.invariant import Invariant
from outrider.verify.recursive import Recursive
from outrider.verify.rejection import Rejection
from tests.draft.model.two_tokenizers import COARSE, CORPUS, FINE, MARKED, ByHand, Knows, Text, joined

PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
PAIRS = {
    "coarse target, fine draft": (COARSE, FINE),
    "fine target, coarse draft": (FINE, COARSE),
    "byte-level target, marked draft": (COARSE, MARKED),
    "marked target, byte-level draft": (MARKED, COARSE),
}
MAPS = {name: VocabularyMap(target.pieces, draft.pieces, target.encode) for name, (target, draft) in PAIRS.items()}
WORDS = st.sampled_from(
    [word for line in CORPUS for word in line.replace(" ", "  ").split(" ")] + ["\n", " ", "🙂", "x"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=60).map("".join) | st.text(max_size=40)
EXACT = ["coarse target, fine draft", "fine target, coarse draft"]


# Translation


@pytest.mark.parametrize("pair", PAIRS)
@given(text=TEXTS, ended=st.booleans(), seed=st.integers(0, 9))
def test_a_translated_run_spells_the_same_bytes(pair: str, text: str, ended: bool, seed: int) -> None:
    target, draft = PAIRS[pair]
    cache = cache_for(MAPS[pair], 1 << 20)
    data = text.encode()
    ids = draft.encode(data)
    mirror = Mirror(target.pieces, {}, draft)
    mirror.follow(target.encode(data)[: seed * 4])
    for token, run in mirror.runs():
        cache.learn(token, run)
    out = translate(ids, MAPS[pair], cache, ended)
    assert joined(draft, ids).startswith(joined(target, out))
    if ended and joined(draft, ids) == data:
        assert joined(target, out) == data


@pytest.mark.parametrize("pair", EXACT)
@given(text=TEXTS)
def test_runs_learnt_from_a_text_translate_it_back_to_the_targets_own_tokens(pair: str, text: str) -> None:
    target, draft = PAIRS[pair]
    cache, mirror = cache_for(MAPS[pair], 1 << 20), Mirror(target.pieces, {}, draft)
    mirror.follow(target.encode(text.encode()))
    for token, run in mirror.runs():
        assert len(run) > 1 and joined(draft, run) == target.pieces[token]
        cache.learn(token, run)
        assert translate(run, MAPS[pair], cache) == [token]


def test_the_longest_cached_run_wins_and_an_open_end_waits() -> None:
    target, draft = ByHand(b"a", b"b", b"ab", b"aba"), ByHand(b"a", b"b", b"c", b"")
    mapped = VocabularyMap(target.pieces, draft.pieces)
    cache = cache_for(mapped, 1 << 20)
    assert translate([0, 1, 0], mapped, cache) == [0, 1, 0]
    cache.learn(2, [0, 1])
    assert translate([0, 1, 0], mapped, cache) == [2, 0]
    cache.learn(3, [0, 1, 0])
    assert translate([0, 1, 0, 1], mapped, cache) == [3, 1]
    assert translate([1, 0, 1], mapped, cache, ended=False) == [1]  # "ab" may still become "aba"
    assert translate([1, 2, 1], mapped, cache) == [1]  # nothing spells "c"
    assert translate([3, 1], mapped, cache) == []  # a special token


def test_special_tokens_and_unknown_ids_never_map() -> None:
    for pair, (target, draft) in PAIRS.items():
        silent = [i for i, piece in enumerate(draft.pieces) if not piece]
        assert silent and (MAPS[pair].first[silent] == NOTHING).all()
        assert not {i for i, piece in enumerate(target.pieces) if not piece} & set(MAPS[pair].first.tolist())


# The draft's view of the text


@pytest.mark.parametrize("pair", PAIRS)
@given(text=TEXTS, data=st.data())
def test_the_text_as_it_grows_is_spelled_as_if_it_had_come_at_once(pair: str, text: str, data) -> None:
    target, draft = PAIRS[pair]
    tokens = target.encode((text + " " + text).encode(), True)
    mirror, seen = Mirror(target.pieces, {}, draft), 0
    while seen < len(tokens):
        before = list(mirror.ids)
        seen += data.draw(st.integers(1, 5))
        stayed = mirror.follow(tokens[:seen])
        assert mirror.ids[:stayed] == before[:stayed]
        whole = joined(target, tokens[:seen])
        assert bytes(mirror.text) == whole
        assert mirror.ids == draft.encode(whole, True)
        assert mirror.ends[-1:] in ([], [len(whole)])


def test_a_change_of_spelling_further_back_is_noticed() -> None:
    target, draft = ByHand(b"a", b"b", b"x", b"c"), ByHand(b"a", b"b", b"ab", b"aba", b"x", b"c", b"abac")
    mirror = Mirror(target.pieces, {}, draft)
    mirror.follow([2, 0, 1, 0])
    assert mirror.ids == [4, 3]
    assert mirror.follow([2, 0, 1, 0, 3]) == 1
    assert mirror.ids == [4, 6]


def test_special_tokens_become_those_of_the_same_name_and_part_the_text() -> None:
    names = {i: name for name, i in COARSE.names.items()}
    turn, other = COARSE.names["<turn>"], FINE.names["<turn>"]
    tokens = [turn, *COARSE.encode(b"the"), turn, *COARSE.encode(b"re")]
    mirror = Mirror(COARSE.pieces, names, FINE)
    for count in range(1, len(tokens) + 1):
        mirror.follow(tokens[:count])
    assert mirror.ids == [other, *FINE.encode(b"the"), other, *FINE.encode(b"re")]
    assert bytes(mirror.text) == b"there"


def test_unfinished_characters_wait_as_bytes() -> None:
    tokens = [i for byte in "🙂".encode() for i, piece in enumerate(COARSE.pieces) if piece == bytes([byte])]
    mirror = Mirror(COARSE.pieces, {}, MARKED)
    for count in range(1, 5):
        mirror.follow(tokens[:count])
        assert joined(MARKED, mirror.ids).lstrip() == "🙂".encode()[:count]


# The cache


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=5), max_size=80), st.integers(1000, 5000))
def test_the_cache_keeps_to_its_bytes_and_forgets_the_oldest_first(runs: list[list[int]], limit: int) -> None:
    cache = NgramCache(memory_bytes=limit)
    for i, run in enumerate(runs):
        cache.learn(i, run)
        held = [*cache._tokens, *cache._prefixes]
        real = sum(map(sys.getsizeof, held)) + 60 * len(held)
        assert cache.used <= limit and real <= cache.used
        assert cache.token(pack(run)) == i  # the newest is always there
        assert set(cache._prefixes) == {key[:end] for key in cache._tokens for end in range(4, len(key), 4)}
    recent = {tuple(run): i for i, run in enumerate(runs)}
    kept = [recent[tuple(np.frombuffer(key, np.int32).tolist())] for key in cache._tokens]
    assert sorted(kept) == sorted(recent.values())[len(recent) - len(kept) :]


def test_the_memory_goes_round_and_one_of_other_vocabularies_is_refused() -> None:
    cache = NgramCache(7)
    for token, run in ((5, [1, 2]), (6, [1, 2, 3]), (7, [9, 9])):
        cache.learn(token, run)
    again = NgramCache(7)
    again.remember(cache.memory())
    assert again._tokens == cache._tokens and again._prefixes == cache._prefixes and again.used == cache.used
    again.forget()
    assert len(again) == again.used == 0
    with pytest.raises(InputError, match="other vocabularies"):
        NgramCache(8).remember(cache.memory())
    with pytest.raises(InputError, match="no cache of merged tokens"):
        NgramCache(7).remember({**cache.memory(), "lengths": np.array([1])})
    with pytest.raises(InputError, match="no cache of merged tokens"):
        NgramCache(7).remember({})


# Laws


def small_source(width: int = 256) -> tuple[CrossVocabulary, ToyTarget]:
    """Bigram and trigram runs, nested and overlapping; one draft token has no counterpart."""
    target, draft = ByHand(b"a", b"b", b"ab", b"aba"), ByHand(b"a", b"b", b"c")
    runtime = ToyTarget(ToyLM(3, seed=7), slots=8)
    source = CrossVocabulary(runtime, VocabularyMap(target.pieces, draft.pieces), {}, draft, width)
    source.cache.learn(2, [0, 1])
    source.cache.learn(3, [0, 1, 0])
    return source, runtime


def distribution_of(source: CrossVocabulary, runtime: ToyTarget):
    """The draft model's distribution after the text and more of its tokens."""
    ids = list(source._seats[0].mirror.ids)
    return lambda *more: runtime.lm.probs([*ids, *more])


@pytest.fixture
def follow_all(monkeypatch) -> None:
    monkeypatch.setattr(cross_vocabulary, "WORTH", 0.0)


def test_the_distribution_in_target_tokens_is_the_product_along_runs_and_sums_to_what_can_be_said(follow_all) -> None:
    for context in ([0], [1, 2], [3, 0, 0], [2, 2, 1, 0, 3]):
        source, runtime = small_source()
        source.begin(0, Text(*context))
        row = source.start([0])[0]
        q = distribution_of(source, runtime)
        a, b = q()[0], q()[1]
        ab = a * q(0)[1]
        aba = ab * q(0, 1)[0]
        assert [row.prob(i) for i in range(4)] == pytest.approx([a - ab, b, ab - aba, aba], abs=1e-6)
        assert row.probs.sum() == pytest.approx(1 - q()[2], abs=1e-6)


def test_after_a_beginning_that_did_not_go_on_the_distribution_knows_it(follow_all) -> None:
    source, runtime = small_source()
    source.begin(0, Text(1, 2))
    source.start([0])
    tree = TokenTree(np.array([2, 0, 2]), np.array([-1, 0, 0]), ((), (), ()))
    after_a, after_ab = source.extend([0], [tree], [1])[0]
    q = distribution_of(source, runtime)
    left = q(0) * [1, 0, 1] / (1 - q(0)[1])  # "a" alone: no "b" followed
    assert after_a.prob(1) == 0 and after_a.prob(2) == pytest.approx(
        left[0] * q(0, 0)[1] * (1 - q(0, 0, 1)[0]), abs=1e-6
    )
    left = q(0, 1) * [0, 1, 1]  # "ab" and no "a" after it
    assert after_ab.prob(1) == pytest.approx(left[1] / (left[1] + left[2]), abs=1e-6) and after_ab.prob(0) == 0


def difference(verifier, grower=Chain, make=small_source, budget: Budget = Budget(3, 3)) -> float:
    """The largest one, over sequences, between what a step emits and what the target says: every outcome counted."""
    target = ToyLM(4, seed=11)

    def draft(paths: Branches) -> TokenTree:
        drafter = CrossVocabularyDrafter(make()[0], grower(), sampled=verifier.coupled)
        drafter.begin(0, Text(*CONTEXT))
        return drafter.propose([0], [budget], [paths.noise("draft")])[0]

    emitted, count = step_distribution(verifier, draft, target)
    assert sum(emitted.values()) == pytest.approx(1.0) and (count > 50 or not verifier.coupled)
    return distance(emitted, target, budget.depth + 1)


@pytest.mark.parametrize("verifier", [Invariant(), Rejection(), Recursive()], ids=lambda v: v.name)
def test_every_outcome_of_a_drafted_chain_has_the_targets_distribution(verifier, follow_all) -> None:
    assert difference(verifier) <= TOLERANCE


def test_every_outcome_of_a_drafted_tree_has_the_targets_distribution(follow_all) -> None:
    assert difference(Recursive(), lambda: KAry((2, 1), "iid"), budget=Budget(4, 2)) <= TOLERANCE
    assert difference(Recursive(), lambda: KAry((2, 1), "without-replacement"), budget=Budget(3, 2)) <= TOLERANCE


def test_following_only_some_runs_keeps_the_distribution(monkeypatch) -> None:
    monkeypatch.setattr(cross_vocabulary, "WORTH", 0.3)
    assert difference(Rejection()) <= TOLERANCE


def test_drawing_from_the_conditional_distribution_and_reporting_the_other_is_seen(follow_all) -> None:
    """The paper's rows: after an unmerged token they forget what did not follow."""

    class Forgetful(CrossVocabulary):
        def _distribution(self, seat, reading):
            again = cross_vocabulary._Reading(reading.at, reading.path, reading.ahead)
            self._read([(seat, again)])
            rows.setdefault(reading.path, super()._distribution(seat, again))
            return super()._distribution(seat, reading)

    class Reports(Chain):
        def grow(self, source, slots, pending, budgets, noise):
            rows.clear()
            out = []
            for tree in super().grow(source, slots, pending, budgets, noise):
                draws = tuple(
                    tuple(Draw(d.token, d.child, _scaled(rows[tuple(tree.path_tokens(node))])) for d in draws)
                    for node, draws in enumerate(tree.draws)
                )
                out.append(dataclasses.replace(tree, draws=draws))
            return out

    def make():
        source, runtime = small_source()
        wrong = Forgetful(runtime, source.mapped, {}, source.vocabulary)
        wrong.cache = source.cache
        return wrong, runtime

    rows: dict = {}
    assert difference(Rejection(), Reports, make) > 1e-4


def _scaled(row):
    return type(row)(row.ids, row.probs / row.probs.sum())


# The whole loop


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_knows_the_text_is_accepted_almost_whole(pair: str, temperature: float) -> None:
    """Wrong alignment, wrong merges or a stale cache would show as rejections."""
    target, draft = PAIRS[pair]
    text = " ".join([CORPUS[0], CORPUS[1], CORPUS[0]]).encode()
    ids = target.encode(text, True)
    prompt = ids[: len(ids) // 4]
    runtime = ToyTarget(Knows(draft, text), slots=4, max_context=2048)
    source = CrossVocabulary(runtime, MAPS[pair], {}, draft)
    drafter = CrossVocabularyDrafter(source, Chain(), sampled=True)
    recipe = Recipe("cross", drafter, Rejection(), Fixed(Budget(5, 5)))
    engine = Engine(ToyTarget(Knows(target, text, 0.999999), max_context=2048), recipe, strict=True)
    params = SamplingParams(max_new_tokens=len(ids) - len(prompt), temperature=temperature, seed=1)
    result = engine.submit(prompt, params).result()
    assert result.token_ids == ids[len(prompt) :]
    assert result.stats.mean_accepted > FLOOR[pair]
    if pair == "coarse target, fine draft":
        assert len(source.cache) > 10


FLOOR = {
    "coarse target, fine draft": 4.5,
    "fine target, coarse draft": 4.5,
    "byte-level target, marked draft": 3.0,
    "marked target, byte-level draft": 3.0,
}


class Watched(CrossVocabulary):
    """The draft's cache must hold the beginning of a fresh encoding of the text, whatever was drafted before."""

    steps = 0

    def start(self, slots):
        rows = super().start(slots)
        for slot in slots:
            seat = self._seats[slot]
            fresh = self.vocabulary.encode(joined(COARSE, seat.context.tokens), True)
            assert [*self.target.committed(seat.slot), *seat.flight.tokens[: len(fresh)]][: len(fresh)] == fresh
            again = self.target.acquire()
            run_all(self.target, [(again, fresh[:-1])])
            assert self.target.committed(again) == tuple(fresh[:-1])
            self.target.release(again)
            type(self).steps += 1
        return rows


@pytest.mark.parametrize("verifier", [Rejection(), Invariant()], ids=lambda v: v.name)
def test_greedy_text_is_plains_and_the_drafts_cache_that_of_a_fresh_encoding(verifier) -> None:
    """Random models over both vocabularies: texts of broken characters, drift at every step."""

    big, small = ToyLM(len(COARSE.pieces), seed=5, order=1), ToyLM(len(FINE.pieces), seed=6, order=2)
    source = Watched(ToyTarget(small, slots=9, max_rows=64), MAPS["coarse target, fine draft"], {}, FINE)
    recipe = Recipe("cross", CrossVocabularyDrafter(source, Chain(), verifier.coupled), verifier, Fixed(Budget(3, 3)))
    engine = Engine(ToyTarget(big), PLAIN, strict=True)
    params = SamplingParams(max_new_tokens=30)
    prompts = [COARSE.encode(text) for text in (b"the other", "Gr\u00fc".encode(), b"x")]
    Watched.steps = 0
    drafted = [engine.submit(prompt, params, recipe).result() for prompt in prompts]
    plain = [engine.submit(prompt, params, PLAIN).result() for prompt in prompts]
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    assert Watched.steps > 50


def test_a_change_of_spelling_behind_what_is_held_back_runs_the_draft_afresh() -> None:
    target, draft = ByHand(b"a", b"b", b"c"), ByHand(b"a", b"b", b"c", b"ab" * 6 + b"c")
    mapped = VocabularyMap(target.pieces, draft.pieces)

    def distributions_of(*texts: list[int]) -> tuple[QRow, tuple[int, ...]]:
        source, context = CrossVocabulary(ToyTarget(ToyLM(4, seed=3)), mapped, {}, draft), Text(*texts[0])
        source.begin(0, context)
        for text in texts:
            context.tokens = np.array(text)
            row = source.start([0])[0]
        seat = source._seats[0]
        return row, (*source.target.committed(seat.slot), *seat.flight.tokens)

    before, after = [2, *[0, 1] * 6], [2, *[0, 1] * 6, 2]
    assert distributions_of(before)[1][:13] == (2, *[0, 1] * 6)
    drifted, fresh = distributions_of(before, after), distributions_of(after)
    assert drifted[1][:2] == fresh[1][:2] == (2, 3)
    assert drifted[0].probs.tolist() == fresh[0].probs.tolist()


def test_a_draft_whose_context_is_full_proposes_nothing() -> None:
    source, _ = small_source()
    source.target.max_context = 12
    recipe = Recipe("cross", CrossVocabularyDrafter(source, Chain(), True), Rejection(), Fixed(Budget(3, 3)))
    engine = Engine(ToyTarget(ToyLM(4, seed=1)), recipe, strict=True)
    result = engine.submit([0, 1], SamplingParams(max_new_tokens=60, temperature=1.0, seed=1)).result()
    assert len(result.token_ids) == 60 and result.stats.drafted < 30
