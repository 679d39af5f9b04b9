"""Particles: their estimate of the legal probability is right where masking is biased; slots are shared, and freed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from outrider.check.toy import ToyLM, ToyTarget
from outrider.constrain.asap import ASAp
from outrider.constrain.predicate.stepwise import Stepwise
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.errors import EmptySupport, InputError, OutriderError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.search.smc import particles
from outrider.verify.invariant import Invariant
from tests.constrain.languages import PROMPT, conditional, future, language

END = 3
LM = ToyLM(4, seed=10)
TEXTS = [(0, 1, 2), (0, 0, 0), (1, 1, 1), (1, 2, 2)]
ENDED = [(*text, END) for text in TEXTS]
TRAPS = [(2, 0), (2, 1, 1), (1, 0), (0, 2, 0)]  # legal beginnings that lead nowhere
DRAWN = SamplingParams(temperature=1.0, max_new_tokens=6, seed=3)


class Slots(ToyTarget):
    """Counts forks and rows of prompts."""

    forks = rows = 0

    def fork(self, slot, length=None):
        self.forks += 1
        return super().fork(slot, length)

    def _text(self, piece, needs):
        self.rows += len(piece.tokens)
        return super()._text(piece, needs)


def engine(lm: ToyLM = LM, slots: int = 8, decode=None) -> Engine:
    recipe = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    return Engine(Slots(lm, slots=slots), recipe, strict=True, eos_ids={END}, decode=decode)


def automaton():
    return language(TEXTS, 4, TRAPS)


def predicate():
    return Stepwise(automaton(), ends={END})


@pytest.mark.parametrize("constraint", [automaton, predicate])
def test_the_normaliser_is_unbiased_and_texts_come_near_the_conditional(constraint) -> None:
    """Within three standard errors, on a language with dead ends where samples under a mask alone are far off."""
    runs, count = 400, 6
    found, texts = [], Counter()
    for seed in range(runs):
        try:
            population = particles(engine(), PROMPT, replace(DRAWN, seed=seed), constraint(), count)
        except EmptySupport:
            found.append(0.0)
            continue
        found.append(math.exp(population.log_normaliser))
        for one in population.texts:
            texts[tuple(one.generation.token_ids)] += one.weight * found[-1]  # weighed so, texts are unbiased, too
    truth = future(LM, ENDED, ())
    error = np.std(found) / math.sqrt(runs)
    assert abs(np.mean(found) - truth) < 3 * error, (np.mean(found), truth, error)
    assert error < 0.1 * truth
    wanted = conditional(LM, ENDED)
    weighed = {text: texts[text] / sum(texts.values()) for text in ENDED}
    masked = masking()
    off = sum(abs(masked[text] - p) for text, p in wanted.items())
    assert sum(abs(weighed[text] - p) for text, p in wanted.items()) < 0.2 < 0.3 < off


def masking() -> dict:
    """What samples under the mask alone give, those that met a dead end left out."""
    counts: Counter = Counter()
    table = automaton()
    running = engine()
    for seed in range(100):
        handle = running.submit(PROMPT, replace(DRAWN, seed=seed, n=8), constraint=table)
        while not handle.done:
            running.step()
        counts.update(tuple(s.history.output) for s in handle.sequences if s.error is None)
    return {text: counts[text] / sum(counts.values()) for text in ENDED}


def test_planted_without_weights_the_normaliser_is_that_of_masking() -> None:
    """What the test above would see if the legal share were forgotten: 1 where nothing died."""
    truth = future(LM, ENDED, ())
    assert abs(1.0 - truth) > 0.3


def test_without_resampling_particles_are_the_engines_samples() -> None:
    whole = language([(0, 1, 2), (0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 0, 1)], 4)
    for constraint in (whole, Stepwise(whole, ends={END})):
        population = particles(engine(), PROMPT, DRAWN, constraint, 5, threshold=0)
        drawn = engine().submit(PROMPT, replace(DRAWN, n=5), constraint=whole).results()
        assert population.resampled == 0 and len(population.texts) == 5
        by_sample = {one.generation.sample: one.generation.token_ids for one in population.texts}
        assert by_sample == {g.sample: g.token_ids for g in drawn}
        assert sum(one.weight for one in population.texts) == pytest.approx(1)


def test_prefixes_are_forked_and_every_slot_is_given_back() -> None:
    running = engine()
    population = particles(running, (*PROMPT, 0, 1, 2, 1), DRAWN, automaton(), 8, threshold=0.9)
    assert population.resampled > 0
    assert running.target.forks > 7  # seven for the prompt, and those of resampling
    assert running.target.rows == 5  # the prompt ran once
    assert running.target.free_slots == 8
    assert 1 <= population.effective <= 8
    assert all(g.generation.stats.new_tokens == 4 for g in population.texts)


def test_particles_that_were_copied_have_the_whole_text() -> None:
    decode = lambda tokens: "".join("abcd"[token] for token in tokens)  # noqa: E731
    given = [(engine(decode=decode), PROMPT, replace(DRAWN, seed=seed), automaton(), 8) for seed in range(20)]
    populations = [particles(*one, threshold=0.95) for one in given]
    assert sum(population.resampled for population in populations) > 20
    for one in (one for population in populations for one in population.texts):
        assert one.generation.text == decode([token for token in one.generation.token_ids if token != END])


def test_a_seed_repeats_a_population() -> None:
    one, other = (particles(engine(), PROMPT, DRAWN, predicate(), 6) for _ in range(2))
    assert [(w.generation.token_ids, w.weight) for w in one.texts] == [
        (w.generation.token_ids, w.weight) for w in other.texts
    ]


def test_it_can_be_ended_between_two_tokens_with_what_there_is() -> None:
    running = engine()
    seen: list[int] = []
    population = particles(running, PROMPT, DRAWN, automaton(), 6, on_step=lambda done: seen.append(done) or done == 2)
    assert seen == [1, 2] and running.target.free_slots == 8
    assert all(len(one.generation.token_ids) == 2 for one in population.texts)


def test_where_every_particle_dies_it_is_said_and_slots_are_free() -> None:
    running = engine()
    with pytest.raises(EmptySupport, match="all 4 particles"):
        particles(running, PROMPT, DRAWN, language([], 4, [(2, 0), (1,)]), 4)
    assert running.target.free_slots == 8


def test_an_engine_that_is_at_work_is_left_alone() -> None:
    running = engine()
    running.submit(PROMPT, DRAWN)
    with pytest.raises(OutriderError, match="requests end first"):
        particles(running, PROMPT, DRAWN, automaton(), 4)


@pytest.mark.parametrize(
    ("changes", "constraint", "count", "message"),
    [
        ({"temperature": 0.0}, automaton, 4, "temperature above 0"),
        ({"top_p": 0.5}, automaton, 4, "no top_k"),
        ({}, automaton, 9, "raise max_slots"),
        ({}, automaton, 0, "ask for 1 to 8"),
        ({}, lambda: [automaton(), ASAp()], 4, "no bound"),
        ({}, list, 4, "need a grammar or a predicate"),
    ],
)
def test_what_cannot_be_weighed_is_refused(changes, constraint, count, message) -> None:
    with pytest.raises(InputError, match=message):
        particles(engine(), PROMPT, replace(DRAWN, **changes), constraint(), count)
