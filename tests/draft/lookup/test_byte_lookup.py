"""Byte lookup: copies through bytes come out in the target's tokens, and are remembered within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.errors import InputError
from outrider.core.records import Budget
from outrider.draft.lookup.byte_lookup import ByteLookup
from outrider.draft.model import cross_vocabulary
from outrider.draft.model.cross_vocabulary import in_target_tokens
from outrider.draft.model.ngram_cache import NgramCache
from outrider.draft.model.vocabulary_map import BYTES, VocabularyMap, characters
from tests.draft.model.two_tokenizers import COARSE, CORPUS, FINE, Text, joined


def lookup(pieces, context, tokens: int = 6, cache: NgramCache | None = None) -> list[int]:
    drafter = ByteLookup(pieces)
    if cache is not None:
        drafter.cache = cache
    drafter.begin(0, Text(*context))
    tree = drafter.propose([0], [Budget(tokens, tokens)], [None])[0]
    return tree.tokens[1:].tolist()


def test_bytes_are_copied_and_said_in_the_targets_tokens() -> None:
    out = lookup(COARSE.pieces, COARSE.encode(b"the weather there gathered the weather"), 20)
    again = b" there gathered the weather" * 6  # what is copied ends with what was looked up: it is copied again
    assert len(out) > 15 and out == COARSE.encode(again)[: len(out)]


def test_a_text_tokenised_otherwise_before_is_still_found() -> None:
    spelled = [i for byte in b"the weather there" for i in COARSE.encode(bytes([byte]))]
    out = lookup(COARSE.pieces, [*spelled, *COARSE.encode(b" the weather")], 8)
    assert joined(COARSE, out).startswith(b" the")


def test_without_a_tokenizer_ids_are_copied_as_they_are() -> None:
    pieces = characters(60000)
    assert len(set(pieces)) == 60000
    pattern = [7, 55297, 300, 59999, 12, 2000, 41]
    assert lookup(pieces, pattern * 3, 6)[:5] == pattern[:5]


def test_a_growing_text_finds_what_a_fresh_index_finds() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 40, 4000).tolist()
    tokens += tokens[100:300]
    pieces = characters(64)
    grown = ByteLookup(pieces)
    context = Text(*tokens[:50])
    grown.begin(0, context)
    for end in range(51, len(tokens) + 1, 37):
        context.tokens = np.array(tokens[:end])
        grown.observe([0], [None])
    context.tokens = np.array(tokens)
    grown.observe([0], [None])
    out = grown.propose([0], [Budget(8, 8)], [None])[0].tokens[1:].tolist()
    assert out == tokens[300:308] == lookup(pieces, tokens, 8)


def test_byte_lookup_remembers_and_forgets() -> None:
    first = ByteLookup(COARSE.pieces)
    first.begin(0, Text(*COARSE.encode(CORPUS[0].encode())))
    second = ByteLookup(COARSE.pieces)
    second.remember(first.memory())
    assert second.cache._tokens == first.cache._tokens and len(first.cache) > 10
    first.forget()
    assert len(first.cache) == 0
    with pytest.raises(InputError, match="other vocabularies"):
        ByteLookup(FINE.pieces).remember(second.memory())


def test_a_private_cache_serves_its_own_request_only() -> None:
    drafter = ByteLookup(COARSE.pieces, private=True)
    drafter.begin(0, Text(*COARSE.encode(CORPUS[0].encode())))
    assert len(drafter.cache) == 0 and len(drafter._slots[0].cache) > 10
    assert VocabularyMap(COARSE.pieces, BYTES).direct
    assert in_target_tokens(cross_vocabulary._Reading(0, ()), np.empty(0, dtype=np.int64))[0].size == 0
