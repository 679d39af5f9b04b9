"""A draft model of another vocabulary that learns between requests: what it learns from, and that it helps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.api import Outrider
from outrider.draft.model.vocabulary_map import VocabularyMap
from outrider.methods.registry import Parts
from outrider.models import LoadedModel, load_model
from outrider.train.online import hybrid
from outrider.train.online.adapt import AdaptPlan, adapt
from outrider.train.online.hybrid import HybridAdapting, Lesson, Told, acceptances, hybrid_loss
from tests.draft.model.two_tokenizers import ByHand, byte_level

PLAN = AdaptPlan(every=90, steps=24, batch=4, length=48, context=8, lr=1.5e-2, background=False)
TARGET, DRAFT = ByHand(b"a", b"b", b"ab", b"c", b"abc"), ByHand(b"a", b"b", b"c")


def teacher() -> HybridAdapting:
    """Only what makes lessons."""
    made = object.__new__(HybridAdapting)
    mapped = VocabularyMap(TARGET.pieces, DRAFT.pieces)
    made.inner = SimpleNamespace(mapped=mapped, names={}, vocabulary=DRAFT)
    made._draft_ids = {piece: i for i, piece in enumerate(DRAFT.pieces)}
    made.model = torch.nn.Linear(1, 1)
    return made


def told(tokens: list[int], last: int) -> Told:
    """The target thought of tokens 0, 2 and 3 with 0.5, 0.3 and 0.1 everywhere."""
    places = torch.tensor([[0, 2, 3]]).repeat(last, 1)
    return Told(tuple(tokens), places, torch.tensor([[0.5, 0.3, 0.1]]).repeat(last, 1))


def test_lessons_begin_where_tokens_of_both_begin_and_runs_are_what_the_target_said_in_one() -> None:
    """c | ab | a | abc | c is c a b a a b c c for the draft."""
    lesson = teacher().lesson(told([3, 2, 0, 4, 3], 4))
    assert lesson is not None
    assert lesson.ids.tolist() == [2, 0, 1, 0, 0, 1, 2, 2]
    assert lesson.rows.tolist() == [0, 2, 3, 6]  # after which ab, a, abc and the last c begin; not the first token
    assert lesson.runs.tolist() == [0, 1, 3, 4, 5]  # rows that say a, b of ab, and a, b, c of abc
    assert lesson.shared.tolist() == [[0, 2, 0]] * 4  # a and c by the draft's ids; ab is no token of the draft's
    torch.testing.assert_close(lesson.probs, torch.tensor([[0.5, 0.1, 0.0]] * 4))


def test_texts_without_a_told_token_teach_nothing() -> None:
    nothing = replace(told([0, 0], 1), probs=torch.tensor([[0.01, 0.9, 0.01]]))  # all of it on a token of one only
    assert teacher().lesson(nothing) is None


class Table(torch.nn.Module):
    """Logits are a table by the last id."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)))

    def forward(self, ids, use_cache):
        return SimpleNamespace(logits=self.table[ids])


def test_the_loss_is_reverse_divergence_over_shared_tokens_and_the_likelihood_of_runs() -> None:
    net, lesson = Table(), teacher().lesson(told([3, 2, 0], 2))
    assert lesson is not None and lesson.rows.tolist() == [0, 2] and lesson.runs.tolist() == [0, 1]
    q = net.table.log_softmax(-1)
    p = torch.tensor([0.5, 0.1]) / 0.6  # of a and c
    far = []
    for last in (2, 1):  # ids behind which ab and a begin
        shared = q[last, [0, 2]].log_softmax(-1)
        far.append((shared.exp() * (shared - p.log())).sum())
    run = -(q[2, 0] + q[0, 1]) / 2  # a behind c, b behind a
    expected = torch.stack(far).mean() + 0.2 * run
    found = hybrid_loss(net, lesson, 0.2)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected, net.table, retain_graph=True)
    (given,) = torch.autograd.grad(found, net.table)
    torch.testing.assert_close(given, wanted)
    whole = net.table.softmax(-1)
    torch.testing.assert_close(
        acceptances(net, lesson)[0], torch.minimum(whole[2, [0, 2]], torch.tensor([0.5, 0.1])).sum()
    )


def test_a_lesson_without_runs_has_no_likelihood() -> None:
    lesson = Lesson(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([[1]]), torch.tensor([[0.7]]),
                    torch.empty(0, dtype=torch.long))  # fmt: skip
    assert float(hybrid_loss(Table(), lesson, 0.2)) == pytest.approx(0.0, abs=1e-6)


# In the engine: a target that often says in one token what its draft spells in several


def model_of(size: int, seed: int) -> LoadedModel:
    tokenizer = byte_level(size)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    with torch.no_grad():  # the next token hangs on the last one mostly
        model.model.embed_tokens.weight.mul_(5.0)
        model.lm_head.weight.mul_(4.0)
    return load_model(model, tokenizer=tokenizer)


@pytest.fixture
def engine() -> Outrider:
    target, draft = model_of(420, 0), model_of(330, 1)
    made = Outrider(target, "plain", runtime="eager", limits={"max_slots": 2, "max_context": 256}, strict=True)
    parts: Parts = made._parts
    parts.drafts["theirs", "any vocabulary"] = draft
    options = {"draft": "theirs", "budget": 3, "controller": "fixed"}
    made._recipes["omnidraft-ngram"] = made._build("omnidraft-ngram", options)
    return made


def stream(engine: Outrider, method: str, count: int, first: int = 0) -> list:
    return [
        engine.generate([[5, 7 + i % 3, 40 + i % 5]], max_new_tokens=32, ignore_eos=True, method=method)[0]
        for i in range(first, first + count)
    ]


def accepted(results: list) -> float:
    return sum(r.stats.new_tokens for r in results) / sum(r.stats.steps for r in results)


@pytest.mark.slow
def test_acceptance_rises_along_a_stream_and_the_text_stays_the_targets(engine: Outrider) -> None:
    plain = stream(engine, "plain", 15)
    frozen = stream(engine, "omnidraft-ngram", 15)
    assert [r.token_ids for r in frozen] == [r.token_ids for r in plain]
    with adapt(engine, PLAN, "omnidraft-ngram") as learner:
        results = stream(engine, "omnidraft-ngram", 15)
        assert "taken" in [update.outcome for update in learner.updates] and not learner.failed
        assert learner.updates[-1].after > 5 * learner.updates[0].before
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert accepted(results[-5:]) > accepted(frozen[-5:])


@pytest.mark.slow
def test_a_poisoned_update_is_taken_back(engine: Outrider) -> None:
    with adapt(engine, PLAN, "omnidraft-ngram") as learner:
        stream(engine, "omnidraft-ngram", 10)
        source = learner.source
        assert isinstance(source, HybridAdapting)
        good = {name: weight.clone() for name, weight in source.model.named_parameters()}
        source._use({**good, "lm_head.weight": good["lm_head.weight"].roll(7, 0)}, good)
        stream(engine, "omnidraft-ngram", 8, first=10)
        assert "rolled back" in source.outcomes


@pytest.mark.slow
def test_a_failing_update_leaves_draft_and_text_alone(engine: Outrider, monkeypatch, caplog) -> None:
    plain = stream(engine, "plain", 6)
    monkeypatch.setattr(hybrid, "hybrid_loss", lambda *_: 1 / 0)
    with adapt(engine, PLAN, "omnidraft-ngram") as learner:
        results = stream(engine, "omnidraft-ngram", 6)
        assert learner.failed and not learner.updates and "adapting the draft model failed" in caplog.text
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]


@pytest.mark.slow
def test_what_was_learnt_can_be_saved_as_a_model(engine: Outrider, tmp_path) -> None:
    with adapt(engine, PLAN, "omnidraft-ngram") as learner:
        stream(engine, "omnidraft-ngram", 6)
        learner.save(tmp_path / "draft")
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "draft")
        for name, weight in learner.source.model.named_parameters():
            torch.testing.assert_close(saved.get_parameter(name), weight)
