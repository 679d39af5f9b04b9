"""Draft models from scratch: the target's design made small, its vocabulary whole, trained past the unigram prior."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.models.drafts import load_draft, read_card
from outrider.models.small import narrowed, small_model, small_shape
from outrider.train.kinds.distill import measure
from outrider.train.kinds.draft_model import DraftModelPlan, draft_model_learner
from outrider.train.kinds.registry import train_drafter
from outrider.train.loop import split
from outrider.train.text.dialogue import ANSWER
from tests.train.conftest import make_markov, make_text

PLAN = DraftModelPlan(steps=80, batch=8, lr=1e-2, held_out=16, hidden=16, depth=1)


@pytest.fixture(scope="module")
def target():
    return make_markov()


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    return make_text(target, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def drafter(target, text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    train_drafter("draft-model", target, text, PLAN, folder, measure_every=40)
    return folder


def test_the_small_model_has_the_targets_design_and_whole_vocabulary(target) -> None:
    small = small_model(target.model, small_shape(target.model, 16, 2))
    config = small.config
    assert type(small) is type(target.model) and (config.hidden_size, config.num_hidden_layers) == (16, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    assert config.intermediate_size == 32 and config.vocab_size == target.model.config.vocab_size
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert target.model.config.hidden_size == 32 and target.model.config.num_hidden_layers == 4
    with pytest.raises(InputError, match="multiple of 8"):
        small_shape(target.model, 20, 2)


def test_narrow_embeddings_keep_which_tokens_are_alike() -> None:
    torch.manual_seed(0)
    wide = torch.randn(50, 6) @ torch.randn(6, 32)  # six directions matter
    narrow = narrowed(wide, 6)
    scale = (narrow @ narrow.T).norm() / (wide @ wide.T).norm()
    torch.testing.assert_close(narrow @ narrow.T / scale, wide @ wide.T, atol=1e-3, rtol=1e-3)
    assert narrow.std() == pytest.approx(float(wide.std()), rel=1e-4) and narrowed(wide, 40).shape == (50, 40)


def test_a_trained_one_beats_the_unigram_prior_and_drafts_exactly(target, text, drafter) -> None:
    held_out, training = split(text, PLAN.held_out)
    greedy, drawn = measure(target.model, load_draft(drafter, target), held_out)
    prior = torch.bincount(training.tokens[training.roles == ANSWER].long(), minlength=64).double()
    p = target.model(held_out.tokens.long()).logits[:, :-1].double().softmax(-1)
    wanted = held_out.roles[:, 1:] == ANSWER
    overlap = float(torch.minimum(p, prior / prior.sum()).sum(-1)[wanted].mean())
    assert drawn > overlap + 0.1 and greedy > float((p.argmax(-1) == prior.argmax())[wanted].double().mean()) + 0.1
    assert read_card(drafter).shape == {"hidden": 16, "depth": 1, "intermediate": 32}
    prompts, options = [[1, 2, 3], [9, 8]], {"draft": str(drafter), "controller": "fixed"}
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 2}):
        rule = {"verifier": "rejection"} if not sampling["temperature"] else {"verifier": "invariant"}
        drafted = Outrider(target, "draft-model", options | rule, strict=True).generate(
            prompts, max_new_tokens=24, **sampling
        )
        plain = Outrider(target, "plain").generate(prompts, max_new_tokens=24, **sampling)
        assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
        assert sum(g.stats.accepted for g in drafted) > 3


def test_both_forms_go_on_from_a_finished_draft(target, text, drafter, tmp_path) -> None:
    held_out, _ = split(text, PLAN.held_out)
    again = draft_model_learner(target, text, replace(PLAN, hidden=0), drafter)
    assert again.small is not None and again.small.hidden == 16
    assert again.measure(held_out).sampled == pytest.approx(
        measure(target.model, load_draft(drafter, target), held_out)[1], abs=0.01
    )
    pruned = DraftModelPlan(steps=3, batch=8, held_out=16, layers=(0, 3))
    train_drafter("draft-model", target, text, pruned, tmp_path / "layers")
    card = read_card(tmp_path / "layers")
    assert card.layers == (0, 3) and not card.shape
    assert draft_model_learner(target, text, PLAN, tmp_path / "layers").layers == (0, 3)
    with pytest.raises(InputError, match="exclude each other"):
        draft_model_learner(target, text, replace(PLAN, layers=(0,)), None)


def test_a_damaged_one_is_refused(target, drafter, tmp_path) -> None:
    import json
    import shutil

    shutil.copytree(drafter, tmp_path / "copy")
    card = json.loads((tmp_path / "copy" / "drafter.json").read_text())
    (tmp_path / "copy" / "drafter.json").write_text(json.dumps(card | {"shape": card["shape"] | {"depth": 2}}))
    with pytest.raises(InputError, match="does not hold what"):
        load_draft(tmp_path / "copy", target)
