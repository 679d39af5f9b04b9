"""How prompts come to a draft model: in the target's pieces, all slots in a pass; what it missed, when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from outrider.check.toy import ToyLM, ToyTarget
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.generation import Generation
from outrider.core.protocols import Recipe, Source
from outrider.core.records import Budget, Chunk, Needs, Piece, Scores
from outrider.core.sampling import SamplingParams
from outrider.draft.grown import Grown
from outrider.draft.model.cross_vocabulary import HELD, CrossVocabulary
from outrider.draft.model.draft_model import ModelSource
from outrider.draft.model.mirror import Mirror
from outrider.draft.model.vocabulary_map import VocabularyMap
from outrider.grow.chain import Chain
from outrider.grow.topk import TopK
from outrider.runtime.targets import eager_target
from outrider.verify.invariant import Invariant
from outrider.verify.rejection import Rejection
from tests.draft.model.two_tokenizers import COARSE, CORPUS, FINE, Text, joined
from tests.watched import Watched, llama

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [9, 8], [5], [7, 7, 7, 30, 2, 1]]
PLAIN = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
LM = ToyLM(5, seed=2, order=2)
MAPPED = VocabularyMap(COARSE.pieces, FINE.pieces, COARSE.encode)


class Noting(ToyTarget):
    """Notes how many rows of text each slot had in each pass."""

    def __init__(self, lm, **options: int) -> None:
        super().__init__(lm, **options)
        self.texts: list[dict[int, int]] = []

    def run(self, pieces: Sequence[Piece], needs: Needs) -> list[Scores]:
        if texts := {piece.slot: len(piece.tokens) for piece in pieces if piece.tree is None}:
            self.texts.append(texts)
        return super().run(pieces, needs)


def rows_by_slot(texts: Sequence[dict[int, int]]) -> Counter[int]:
    return sum((Counter(rows) for rows in texts), Counter())


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, recipe: Recipe) -> list[Generation]:
    handles = [engine.submit(prompt, params, recipe) for prompt in prompts]
    return [generation for handle in handles for generation in handle.results()]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama(1)


@pytest.mark.parametrize(("rows", "draft_rows"), [(1, 512), (4, 4), (7, 2)])
def test_a_prompt_in_pieces_leaves_the_draft_the_cache_of_a_fresh_run(target, rows: int, draft_rows: int) -> None:
    source = Watched(eager_target(llama(2), max_slots=8, prompt_rows=draft_rows))
    engine = Engine(eager_target(target, max_slots=3, prompt_rows=rows), PLAIN, strict=True)
    params = SamplingParams(max_new_tokens=12)
    Watched.steps = Watched.lag = 0
    drafted = run(engine, PROMPTS, params, Recipe("draft", Grown(source, TopK(2)), Invariant(), Fixed(Budget(4, 3))))
    assert Watched.steps > 30 and Watched.lag == 2
    assert [g.token_ids for g in drafted] == [g.token_ids for g in run(engine, PROMPTS, params, PLAIN)]


def test_the_draft_runs_a_prompt_in_the_passes_of_the_target_and_no_token_twice() -> None:
    target, draft = Noting(LM, prompt_rows=6), Noting(ToyLM(5, seed=3), prompt_rows=6)
    recipe = Recipe("draft", Grown(ModelSource(draft), Chain()), Invariant(), Fixed(Budget(2, 2)))
    prompts = [[token % 5 for token in prompt] for prompt in PROMPTS]
    engine = Engine(target, PLAIN, strict=True, clock=lambda: 0.0)
    run(engine, prompts, SamplingParams(max_new_tokens=6), recipe)
    assert [sum(rows.values()) for rows in target.texts] == [6, 6, 6] and draft.texts[:2] == target.texts[:2]
    assert rows_by_slot(draft.texts) == rows_by_slot(target.texts)  # the last pass is cut evenly by the draft


def test_prompts_that_were_not_handed_over_run_together_when_the_draft_is_asked() -> None:
    draft = Noting(ToyLM(5, seed=3), max_rows=8, prompt_rows=12)
    source = ModelSource(draft)
    texts = [[i % 5 for i in range(length)] for length in (20, 3, 9)]
    for slot, text in enumerate(texts):
        source.begin(slot, Text(*text))
    # Of slot 2 only the end was handed over, behind a prefix that the target held: that is read from the text.
    source.absorb([Chunk(2, 6, texts[2][6:8], Scores(None))])
    assert draft.texts == []
    rows = source.start([0, 1, 2])
    assert draft.texts == [{0: 6, 2: 6}, {0: 6, 2: 2}, {0: 7}]  # all but the pending token; slot 1 is a short lead
    for row, text in zip(rows, texts, strict=True):
        np.testing.assert_allclose(row.probs, draft.lm.probs(text)[row.ids])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_that_came_by_fork_costs_the_draft_no_acceptance(target, temperature: float) -> None:
    source = ModelSource(eager_target(target, max_slots=4, max_rows=10), width=53)
    engine = Engine(eager_target(target, max_slots=4), PLAIN, strict=True)
    recipe = Recipe("self", Grown(source, Chain(), sampled=True), Rejection(), Fixed(Budget(4, 4)))
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=8, n=3)
    made = run(engine, PROMPTS[:1], params, recipe)
    assert len(made) == 3 and min(g.stats.mean_accepted for g in made) > 4.9  # q = p: everything is accepted


@pytest.mark.parametrize("other", ["model", "crossing"])
def test_a_draft_whose_context_is_full_proposes_nothing_and_hinders_nobody(other: str) -> None:
    """One prompt does not fit the draft, one outgrows it, one stays within."""
    small = ToyTarget(ToyLM(len(COARSE.pieces), seed=5, order=1), max_context=24)
    source: Source = ModelSource(small)
    if other == "crossing":
        small = ToyTarget(ToyLM(len(FINE.pieces), seed=5, order=1), max_context=24)
        source = CrossVocabulary(small, MAPPED, {}, FINE)
    recipe = Recipe("draft", Grown(source, TopK(2)), Invariant(), Fixed(Budget(4, 3)))
    engine = Engine(ToyTarget(ToyLM(len(COARSE.pieces), seed=6, order=1)), PLAIN, strict=True)
    text = COARSE.encode(CORPUS[0].encode())
    prompts, params = [(text * 3)[:30], text[:4], text[:2]], SamplingParams(max_new_tokens=30)
    made = run(engine, prompts, params, recipe)
    assert [g.token_ids for g in made] == [g.token_ids for g in run(engine, prompts, params, PLAIN)]
    assert made[0].stats.drafted == 0 < min(g.stats.drafted for g in made[1:])
    assert all(g.stats.drafter_failures == 0 for g in made) and small.free_slots == 4


# In another tokenizer's spelling


@given(text=st.text(max_size=30) | st.sampled_from(CORPUS), data=st.data())
def test_leading_ids_within_so_many_target_tokens_spell_no_byte_more(text: str, data) -> None:
    tokens = COARSE.encode(text.encode())
    count = data.draw(st.integers(0, len(tokens)))
    mirror = Mirror(COARSE.pieces, {}, FINE)
    mirror.follow(tokens)
    inside, whole = mirror.within(count), joined(COARSE, tokens[:count])
    assert whole.startswith(joined(FINE, mirror.ids[:inside]))
    assert inside == len(mirror.ids) or len(joined(FINE, mirror.ids[: inside + 1])) > len(whole)


@pytest.mark.parametrize("rows", [1, 5, 512])
def test_a_draft_in_another_spelling_runs_the_same_stretches_of_text(rows: int) -> None:
    draft = Noting(ToyLM(len(FINE.pieces), seed=6, order=2), prompt_rows=max(rows, 8))
    source = CrossVocabulary(draft, MAPPED, {}, FINE)
    text = COARSE.encode(CORPUS[0].encode())
    ids = FINE.encode(CORPUS[0].encode(), True)
    for slot in (0, 1):
        source.begin(slot, Text(*text))
    for start in range(0, len(text) - 1, rows):
        stretch = text[start : min(start + rows, len(text) - 1)]
        source.absorb([Chunk(slot, start, stretch, Scores(None)) for slot in (0, 1)])
        for slot in (0, 1):
            cached = draft.committed(slot)
            assert cached == tuple(ids[: len(cached)])
            assert len(joined(FINE, cached)) <= len(joined(COARSE, text[: start + rows]))
    assert [draft.length(slot) for slot in (0, 1)] == [len(ids) - HELD] * 2
    assert all(len(texts) == 2 for texts in draft.texts)  # both slots in every pass
    before = len(draft.texts)
    source.start([0, 1])
    assert len(draft.texts) == before  # there was nothing left to catch up on
