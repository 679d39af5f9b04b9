"""ASAp's bounds fall towards the truth and never below it; samples approach the model's, given the grammar."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from outrider.check.toy import ToyLM
from outrider.constrain.asap import ASAp
from outrider.core.errors import EmptySupport, InputError
from outrider.core.params import SamplingParams
from outrider.core.records import SeenRow
from outrider.search.aligned import rounds
from tests.constrain.languages import (
    PROMPT,
    chance,
    conditional,
    current,
    divergence,
    future,
    language,
    random_texts,
    toy_engine,
)

DRAWN = SamplingParams(temperature=1.0, max_new_tokens=5, seed=3)


def prefixes(texts):
    return sorted({text[:end] for text in texts for end in range(len(text))}, key=len)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_never_rise_and_stay_above_the_truth(seed: int, drafted: bool) -> None:
    lm, texts = ToyLM(3, seed=seed), random_texts(seed)
    automaton, learner = language(texts, 3), ASAp(whole_trees=drafted)
    truth = future(lm, texts, ())
    before, inner = 1.0, dict.fromkeys(prefixes(texts), 1.0)
    for one in rounds(toy_engine(lm, drafted), PROMPT, DRAWN, [automaton], learner, 40):
        assert truth - 1e-7 <= one.bound <= before
        before = one.bound
        for prefix in inner:
            for token, lower in zip(*learner.lowered(prefix), strict=True):
                deeper = (*prefix, int(token))
                if deeper in inner:
                    assert future(lm, texts, deeper) - 1e-6 <= math.exp(lower) <= inner[deeper] + 1e-6
                    inner[deeper] = math.exp(lower)
        assert all(tuple(g.token_ids) in texts for g in one.generations)
    assert before < 1.0


@pytest.mark.parametrize("seed", range(6))
def test_with_every_inner_node_looked_at_the_samples_are_the_models(seed: int) -> None:
    lm, texts = ToyLM(3, seed=seed), random_texts(seed)
    automaton, learner = language(texts, 3), ASAp()
    first = divergence(conditional(lm, texts), current(lm, automaton, learner, texts))
    for prefix in prefixes(texts):
        learner.observe([row(lm, automaton, prefix)])
    assert learner.settle() == pytest.approx(future(lm, texts, ()), abs=1e-12)
    assert divergence(conditional(lm, texts), current(lm, automaton, learner, texts)) < 1e-9 < first


def row(lm: ToyLM, automaton, prefix, probs=None) -> SeenRow:
    state = 0
    for token in prefix:
        state = automaton.table[state][token]
    probs = lm.probs([*PROMPT, *prefix]) if probs is None else probs
    return SeenRow(prefix, probs, automaton.mask([state])[0], ())


def test_the_planted_fake_that_keeps_masked_probabilities_stays_where_masking_is() -> None:
    lm, texts = ToyLM(3, seed=1), random_texts(1)
    automaton, learner = language(texts, 3), ASAp()
    masking = divergence(conditional(lm, texts), current(lm, automaton, learner, texts))
    for prefix in prefixes(texts):
        seen = row(lm, automaton, prefix)
        bits = np.unpackbits(seen.legal.view(np.uint8), bitorder="little")[:3]
        learner.observe([row(lm, automaton, prefix, seen.probs * bits / (seen.probs * bits).sum())])
    assert learner.settle() == pytest.approx(1.0)
    assert divergence(conditional(lm, texts), current(lm, automaton, learner, texts)) == pytest.approx(masking)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_engine_draws_from_the_tempered_model_times_the_bounds(temperature: float) -> None:
    """A bound that acted before the temperature would be raised to 1 / temperature: seen at 0.5 and at 2."""
    lm, texts = ToyLM(3, seed=2), random_texts(2)
    automaton, learner = language(texts, 3), ASAp()
    engine = toy_engine(lm)
    params = replace(DRAWN, temperature=temperature)
    for _ in rounds(engine, PROMPT, params, [automaton], learner, 300):
        pass
    tempered = Tempered(lm, temperature)
    wanted = conditional(tempered, texts)
    assert divergence(wanted, current(tempered, automaton, learner, texts)) < 1e-6
    counts = dict.fromkeys(texts, 0)
    params = replace(params, n=600, seed=11)
    for generation in engine.submit(PROMPT, params, constraint=[automaton, learner]).results():
        counts[tuple(generation.token_ids)] += 1
    square = sum((counts[text] - 600 * p) ** 2 / (600 * p) for text, p in wanted.items())
    assert square < len(texts) + 5 * math.sqrt(2 * len(texts)), (counts, wanted)


class Tempered(ToyLM):
    def __init__(self, lm: ToyLM, temperature: float) -> None:
        object.__setattr__(self, "lm", lm)
        object.__setattr__(self, "power", 1 / temperature)

    __slots__ = ("lm", "power")

    def probs(self, context):
        p = self.lm.probs(context) ** self.power
        return p / p.sum()


def test_a_dead_end_is_met_once_and_never_again() -> None:
    lm = ToyLM(3, seed=5)
    texts, traps = [(0, 1, 2), (1, 1, 1)], [(2, 0), (2, 1, 1)]
    automaton, learner = language(texts, 3, traps), ASAp()
    met = [one.dead_ends for one in rounds(toy_engine(lm), PROMPT, replace(DRAWN, n=4), [automaton], learner, 30)]
    assert sum(met) > 0 and not any(met[-10:])
    assert learner.bound == pytest.approx(future(lm, texts, ()), rel=1e-6)


def test_a_grammar_that_leads_nowhere_at_all_is_named() -> None:
    automaton = language([], 3, [(2, 0), (1, 1)])
    with pytest.raises(EmptySupport, match="no probability to any text"):
        for _ in rounds(toy_engine(ToyLM(3)), PROMPT, DRAWN, [automaton], ASAp(), 50):
            pass


def test_many_legal_tokens_are_kept_as_a_difference_and_give_the_same_bounds() -> None:
    rng = np.random.default_rng(4)
    probs, legal = rng.dirichlet([0.5] * 200), rng.random(200) < 0.6
    legal[:3] = True
    words = np.packbits(np.pad(legal, (0, 24)), bitorder="little").view(np.int32)
    dead = np.zeros(7, dtype=np.int32)
    sparse = ASAp()
    sparse.observe(
        [SeenRow((), probs, words, (0, 1)), SeenRow((0,), probs, dead, ()), SeenRow((1, 2), probs, dead, ())]
    )
    sparse.observe([SeenRow((1,), probs, words, (2,))])
    second = probs[legal].sum() - probs[2]
    want = probs[legal].sum() - probs[0] - probs[1] * (1 - second)
    assert sparse.settle() == pytest.approx(want, abs=1e-12)
    ids, lower = sparse.lowered(())
    assert dict(zip(ids.tolist(), np.exp(lower), strict=True)) == pytest.approx({0: 0.0, 1: second})


def test_equal_seeds_give_equal_rounds_with_any_drafter_unless_whole_trees_teach() -> None:
    lm, texts = ToyLM(3, seed=8), random_texts(8)
    automaton = language(texts, 3)

    def said(drafted: bool) -> list[list[list[int]]]:
        drawn = rounds(toy_engine(lm, drafted), PROMPT, replace(DRAWN, n=3), [automaton], ASAp(), 12)
        return [[g.token_ids for g in one.generations] for one in drawn]

    assert said(False) == said(True)


def test_a_round_ends_early_where_the_bound_stands_still() -> None:
    lm, texts = ToyLM(3, seed=8), random_texts(8)
    done = list(rounds(toy_engine(lm), PROMPT, DRAWN, [language(texts, 3)], ASAp(), 500, patience=25))
    assert len(done) < 500


def test_what_it_cannot_be_exact_for_is_refused() -> None:
    learner = ASAp()
    with pytest.raises(InputError, match="leave out top_k"):
        learner.begin(PROMPT, replace(DRAWN, top_p=0.9))
    learner.begin(PROMPT, DRAWN)
    learner.begin(PROMPT, replace(DRAWN, seed=9, n=4, max_new_tokens=9))
    with pytest.raises(InputError, match="another prompt"):
        learner.begin((1, 0), DRAWN)
    with pytest.raises(InputError, match="other parameters"):
        learner.begin(PROMPT, replace(DRAWN, temperature=0.5))
    lm = ToyLM(3, seed=1)
    learner.observe([row(lm, language([(0, 1)], 3), ())])
    learner.settle()
    with pytest.raises(InputError, match="another grammar"):
        learner.observe([row(lm, language([(1, 1)], 3), ())])


def test_greedy_takes_the_support_of_the_bounds_and_nothing_else() -> None:
    lm, texts = ToyLM(3, seed=5), [(0, 1, 2), (1, 1, 1)]
    automaton, learner = language(texts, 3, [(2, 0)]), ASAp()
    params = SamplingParams(max_new_tokens=5)
    learner.begin(PROMPT, params)
    learner.dead((2, 0))
    learner.observe([row(lm, automaton, (2,))])
    learner.settle()
    (generation,) = toy_engine(lm).submit(PROMPT, params, constraint=[automaton, learner]).results()
    assert tuple(generation.token_ids) in texts
    assert chance(lm, (2,)) > 0


def test_a_full_trie_is_still_sound() -> None:
    lm, texts = ToyLM(3, seed=3), random_texts(3)
    learner = ASAp(max_nodes=3)
    for one in rounds(toy_engine(lm), PROMPT, DRAWN, [language(texts, 3)], learner, 40):
        assert one.bound >= future(lm, texts, ()) - 1e-7
    assert learner.nodes <= 3
