"""Every output is a stretch of the corpus, speculative text is plain text, and masks are those of a scan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.check.toy import ToyLM
from outrider.constrain.substring import Substring
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Automaton
from tests.constrain.languages import PROMPT, toy_engine


class Scanned:
    """`Occurrences` by looking at all of a small corpus: a state is the text."""

    everything: tuple[int, ...] = ()

    def __init__(self, documents):
        self.documents = documents

    def following(self, state):
        after = [d[i + len(state)] for d in self.documents for i in range(len(d) - len(state))
                 if tuple(d[i : i + len(state)]) == state]  # fmt: skip
        ids, counts = np.unique(np.array(after, dtype=np.int64), return_counts=True)
        return ids, counts

    def narrow(self, state, token):
        return (*state, token) if token in self.following(state)[0] else None


DOCUMENTS = [[0, 1, 2, 0, 1, 1, 2], [2, 2, 0, 1, 0], [1]]


def occurs(text) -> bool:
    return any(list(text) == d[i : i + len(text)] for d in DOCUMENTS for i in range(len(d)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_output_occurs_and_drafting_does_not_change_it(temperature: float) -> None:
    automaton = Substring(Scanned(DOCUMENTS), 4)
    assert isinstance(automaton, Automaton)
    for seed in range(8):
        lm = ToyLM(4, seed=seed)
        params = SamplingParams(temperature=temperature, max_new_tokens=9, n=3, seed=seed)
        said = []
        for drafted in (False, True):
            engine = toy_engine(lm, drafted)
            engine.eos_ids = frozenset({3})
            said.append([g.token_ids for g in engine.submit(PROMPT, params, constraint=automaton).results()])
        assert said[0] == said[1]
        for text in said[0]:
            body = text[:-1] if text[-1] == 3 else text
            assert body and occurs(body)


@given(st.lists(st.integers(0, 3), max_size=4))
@settings(max_examples=60, deadline=None)
def test_masks_steps_and_single_answers_agree(path: list[int]) -> None:
    automaton = Substring(Scanned(DOCUMENTS), 4)
    state = automaton.start(PROMPT)
    assert not automaton.complete(state)
    for token in path:
        row = automaton.mask([state])[0]
        assert [bool(row[0] >> t & 1) for t in range(4)] == [automaton.allows(state, t) for t in range(4)]
        after = automaton.advance(state, token)
        assert (after is not None) == automaton.allows(state, token)
        if after is None:
            break
        state = after
        assert automaton.complete(state)


def test_a_corpus_of_another_vocabulary_or_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="use its tokenizer"):
        Substring(Scanned(DOCUMENTS), 2)
    with pytest.raises(InputError, match="empty"):
        Substring(Scanned([]), 4)
