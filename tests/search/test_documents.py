"""Documents are found by what a model would write: keys that occur, the paper's weights, the right document first."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.check.toy import ToyLM, ToyTarget
from outrider.core.errors import InputError
from outrider.search.documents import Key, find, keys, ranked, rated, stretches, worth, written
from outrider.store.fm.files import CompactStore
from outrider.store.fm.index import index
from outrider.store.format import Manifest

divsufsort = pytest.importorskip("pydivsufsort", reason="building an index needs the extra retrieval").divsufsort
DOCUMENTS = [[0, 1, 2, 0, 1, 1, 2], [2, 2, 0, 1, 0], [1, 1, 1, 0]]
PROMPT = (0, 1, 2)


def store(documents=DOCUMENTS) -> CompactStore:
    made = index([np.array(document) for document in documents], divsufsort)
    return CompactStore((made,), Manifest("ids", "ids", 4))


def log_prob(lm: ToyLM, gram) -> float:
    return sum(math.log(lm.probs([*PROMPT, *gram[:i]])[token]) for i, token in enumerate(gram))


def test_what_is_written_occurs_and_has_the_models_probability() -> None:
    lm, corpus = ToyLM(3, seed=4), store()
    target = ToyTarget(lm)
    grams = written(target, PROMPT, corpus, beams=50, length=3)
    every = {tuple(d[i : i + n]) for d in DOCUMENTS for n in (1, 2, 3) for i in range(len(d) - n + 1)}
    assert set(grams) == every  # the beams hold all of so small a corpus
    assert all(found == pytest.approx(log_prob(lm, gram), abs=1e-5) for gram, found in grams.items())
    assert rated(target, PROMPT, list(every)) == pytest.approx(grams, abs=1e-5)
    assert target.free_slots == 4


def test_a_narrow_beam_keeps_the_likeliest_of_each_length() -> None:
    lm = ToyLM(3, seed=4)
    wide, narrow = (written(ToyTarget(lm), PROMPT, store(), beams, 2) for beams in (50, 2))
    for size in (1, 2):
        kept = sorted((gram for gram in narrow if len(gram) == size), key=narrow.get)
        assert len(kept) == 2
    assert sorted(gram for gram in narrow if len(gram) == 1) == sorted(
        sorted((gram for gram in wide if len(gram) == 1), key=wide.get)[-2:]
    )


def test_weights_are_the_papers_rising_with_the_probability_and_falling_with_the_count() -> None:
    p, f, n = 0.2, 3, 1000
    usual = (f + 5) / (n + 5)
    assert worth(math.log(p), f, n) == pytest.approx(math.log(p * (1 - usual) / (usual * (1 - p))) ** 2)
    rising = [worth(math.log(p), 3, 1000) for p in (1e-9, 0.01, 0.1, 0.5, 0.999)]
    assert rising == sorted(rising) and rising[0] == 0
    falling = [worth(math.log(0.2), count, 1000) for count in (1, 10, 50, 400)]
    assert falling == sorted(falling, reverse=True) and falling[-1] == 0
    assert math.isfinite(worth(0.0, 1, 10))


def test_a_document_is_the_sum_of_what_does_not_overlap_less_what_was_said() -> None:
    corpus = store()
    one, two = Key((0, 1), -1.0, 2, 9.0), Key((1, 2), -1.0, 2, 4.0)
    found = {f.document: f for f in ranked(corpus, [one, two], 5)}
    # [0 1] 2 0 1 [1 2]: of the second one, token 2 is new and 1 is not
    assert found[0].score == pytest.approx(9.0 + 4.0 * (0.2 + 0.8 * 0.5))
    assert found[1].score == pytest.approx(9.0) and found[1].keys == (one,)
    assert 2 not in found
    overlapping = {
        f.document: f for f in ranked(corpus, [Key((2, 0, 1), -1.0, 2, 9.0), Key((0, 1, 0), -1.0, 1, 4.0)], 5)
    }
    assert overlapping[1].keys == (Key((2, 0, 1), -1.0, 2, 9.0),)


def test_the_document_that_holds_what_the_model_says_comes_first() -> None:
    lm = ToyLM(60, seed=4, concentration=0.01)
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(20):
        documents = [rng.integers(0, 60, 400).tolist() for _ in range(6)]
        said, text = [], list(PROMPT)
        for _ in range(8):
            said.append(int(lm.probs(text).argmax()))
            text.append(said[-1])
        documents[3][5:13] = said
        best = find(ToyTarget(lm), PROMPT, (2, 2), store(documents), beams=4, length=8)
        hits += best[0].document == 3
    assert hits >= 12  # by chance one in six


def test_planted_a_ranking_that_forgets_the_corpus_frequency_is_worse() -> None:
    """A common stretch that the model finds likely must not outweigh a rare one."""
    corpus = store([[0, 1] * 40, [0, 1] * 40, [2, 2, 1, 2, 0]])
    grams = {(0, 1): math.log(0.3), (2, 2, 1): math.log(0.05)}
    right = ranked(corpus, keys(corpus, grams), 3)
    assert right[0].document == 2
    fake = [Key(gram, p, 1, worth(p, 1, corpus.tokens)) for gram, p in grams.items()]
    assert ranked(corpus, sorted(fake, key=lambda key: -key.weight), 3)[0].document != 2


def test_stretches_of_a_question_come_once_and_bad_numbers_are_named() -> None:
    assert stretches([5, 6, 5, 6], 2) == [(5,), (6,), (5, 6), (6, 5)]
    with pytest.raises(InputError, match="at least 1"):
        find(ToyTarget(ToyLM(3)), PROMPT, (1,), store(), top=0)
