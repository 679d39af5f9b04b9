"""STAND's table: bounded, keyed by n-grams of one text, shared as asked, kept and given back."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.api import Outrider
from outrider.check.toy import ToyLM
from outrider.core.errors import InputError
from outrider.core.records import Needs
from outrider.core.sampling import SamplingParams
from tests.draft.greedy import PROMPTS, as_plain
from tests.draft.table.test_stand import V, knowing, stand
from tests.draft.toy_loop import history, step


def test_memory_stays_within_its_limit_and_the_oldest_leaves_first() -> None:
    with pytest.raises(InputError, match="the least that works is") as error:
        stand(memory_bytes=1000)
    least = int(str(error.value).rsplit(" ", 1)[1])
    drafter = stand(64, memory_bytes=least, learn_prompt=False)
    assert drafter.nbytes <= least
    source = np.random.default_rng(0)
    past = history([1, 2], 64)
    drafter.begin(0, past)
    for _ in range(3000):
        step(drafter, 0, past, source.normal(size=64), int(source.integers(64)))
    assert drafter.nbytes <= least
    drafter.begin(1, history(past.tokens[-5:-1].tolist(), 64))
    assert drafter.distribution(1).ids.size
    drafter.begin(1, history(past.tokens[:4].tolist(), 64))
    assert drafter._seats[1].reader.longest == 4 and len(drafter.memory()["keys"]) == len(drafter._table.keys)


def test_every_key_is_an_n_gram_of_one_text() -> None:
    drafter = stand()
    texts = [[0, 1, 2], [3, 4, 5, 6]]
    pasts = [history(text[:1], V) for text in texts]
    for slot in (0, 1):
        drafter.begin(slot, pasts[slot])
    for place in range(1, 4):  # both in one batch, step by step
        for slot, text in enumerate(texts):
            if place < len(text):
                step(drafter, slot, pasts[slot], np.zeros(V), text[place])
    keys = drafter.memory()["keys"]
    tokens = np.stack([keys[:, 0] >> 32, keys[:, 0] & 0xFFFFFFFF, keys[:, 1] >> 32, keys[:, 1] & 0xFFFFFFFF], 1) - 1
    found = {tuple(t for t in row if t >= 0) for row in tokens.tolist()}
    assert found == {(0, 1), (3, 4), (3, 4, 5), (4, 5)}


@pytest.mark.parametrize(("scope", "seen"), [("shared", (1, 1)), ("prompt", (1, 0)), ("private", (0, 0))])
def test_who_shares_is_what_was_asked_for(scope: str, seen: tuple[int, int]) -> None:
    drafter = stand(scope=scope)
    drafter.begin(0, past := history([6, 7], V))
    step(drafter, 0, past, np.arange(V), 5)
    drafter.begin(1, history([6, 7], V))
    drafter.begin(2, history([3, 6, 7], V))
    assert (int(drafter.distribution(1).ids.size > 0), int(drafter.distribution(2).ids.size > 0)) == seen
    assert (len(drafter.memory()["keys"]) > 0) is (scope == "shared")  # only what is everybody's is kept


def test_a_private_request_reads_what_was_remembered_and_leaves_it_as_it_was() -> None:
    teacher = stand()
    teacher.begin(0, past := history([6, 7], V))
    step(teacher, 0, past, np.arange(V), 5)
    drafter = stand(scope="private")
    drafter.remember(teacher.memory())
    drafter.begin(0, past := history([6, 7], V, 1.0))
    before = drafter.distribution(0)
    step(drafter, 0, past, -np.arange(V), 5)
    drafter.begin(1, history([6, 7], V, 1.0))
    np.testing.assert_array_equal(drafter.distribution(1).probs, before.probs)
    drafter._seats[0].context = history([6, 7], V, 1.0)
    assert drafter.distribution(0).probs.tolist() != before.probs.tolist()


def test_memory_goes_round_and_foreign_arrays_are_refused() -> None:
    drafter = knowing(ToyLM(5, seed=1))
    good = drafter.memory()
    copy = stand(5)
    copy.remember(good)
    assert all(np.array_equal(copy.memory()[name], good[name]) for name in good)
    wrong = [
        {},
        {**good, "keys": good["keys"][:, :1]},
        {**good, "keys": good["keys"] + (9 << 32)},
        {**good, "ids": good["ids"][:, :4]},
        {**good, "ids": good["ids"] + 5},
        {**good, "values": good["values"] * np.nan},
        {**good, "values": good["values"] + 2},
        {**good, "counts": good["counts"][1:]},
        {**good, "counts": good["counts"] * 1.5},
        {**good, "won": good["won"][:1]},
    ]
    for arrays in wrong:
        with pytest.raises(InputError):
            copy.remember(arrays)
    assert all(np.array_equal(copy.memory()[name], good[name]) for name in good)
    copy.forget()
    assert len(copy.memory()["keys"]) == 0


@pytest.mark.parametrize(
    "options", [{}, {"verifier": "invariant"}, {"scope": "private"}, {"learn_rejected": True}], ids=str
)
def test_greedy_text_is_plains_and_samples_of_one_prompt_learn_from_each_other(tiny_llama, options: dict) -> None:
    engine = Outrider(tiny_llama, "plain", strict=True)
    recipe = engine.recipe("stand", {"controller": "fixed", **options})
    # From an empty table, then from a hot one
    steps = [sum(generation.stats.steps for generation in as_plain(engine, recipe)) for _ in range(2)]
    if options.get("scope") == "private":  # an earlier request cannot be felt
        assert steps[1] == steps[0]
    else:
        assert steps[1] < 0.8 * steps[0]
    samples = engine.engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=24, temperature=0.8, n=4, seed=1), recipe)
    assert all(len(g.token_ids) <= 24 for g in samples.results())


def test_the_prompts_rows_are_asked_for_only_where_they_teach() -> None:
    assert stand().needs == Needs(logits=True, top=10) and stand().needs.of_prompt
    assert not stand(learn_prompt=False).needs.of_prompt
