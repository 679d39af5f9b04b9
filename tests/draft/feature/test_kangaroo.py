"""Kangaroo: the adapter is what the paper says, only it is trained, it beats the bare exit, texts are the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.models import first_layers, load_model
from outrider.models.drafts import read_card
from outrider.models.networks.kangaroo import kangaroo_model
from outrider.models.trained import load_trained
from outrider.train.kinds.distill import measure
from outrider.train.kinds.kangaroo import KangarooPlan, kangaroo_learner
from outrider.train.kinds.registry import train_drafter
from outrider.train.loop import split
from tests.train.conftest import make_markov, make_target, make_text
from tests.watched import Watched

PLAN = KangarooPlan(steps=60, batch=8, lr=5e-3, held_out=16, layer=2)
PROMPTS = [[1, 2, 3, 4], [9, 8], [5], [7, 7, 7, 30, 2, 1]]


@pytest.fixture(scope="module")
def target():
    return make_markov(rest=0.6)


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    return make_text(target, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def drafter(target, text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kangaroo")
    train_drafter("kangaroo", target, text, PLAN, folder, measure_every=30)
    return folder


@torch.no_grad()
def test_the_adapter_is_norm_attention_and_norm_behind_the_first_layers(target) -> None:
    short, adapter = kangaroo_model(target.model, 2)
    tokens = torch.tensor([[5, 9, 30, 2, 41]])
    state = target.model(tokens, output_hidden_states=True).hidden_states[2]
    layer = target.model.model.layers[2]
    position = torch.arange(5)[None]
    rotary = target.model.model.rotary_emb(state, position)
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    attended = layer.self_attn(layer.input_layernorm(state), attention_mask=mask, position_embeddings=rotary)[0]
    expected = target.model.lm_head(target.model.model.norm(state + attended))
    torch.testing.assert_close(short(tokens, use_cache=False).logits, expected, atol=1e-5, rtol=1e-4)
    assert set(adapter) == {"input_layernorm.weight", "norm.weight", *(f"self_attn.{x}_proj.weight" for x in "qkvo")}


def test_only_the_adapter_is_trained_and_the_target_stays(target, text) -> None:
    before = {name: weight.clone() for name, weight in target.model.named_parameters()}
    learner = kangaroo_learner(target, text, PLAN, None)
    for weight in learner.weights.values():
        weight.requires_grad_(True)
    learner.backward(type(text)(text.tokens[:4], text.roles[:4]))
    assert all(weight.grad is not None and weight.grad.any() for weight in learner.weights.values())
    with torch.no_grad():
        for weight in learner.weights.values():
            weight.add_(1.0)
    assert all(torch.equal(before[name], weight) for name, weight in target.model.named_parameters())
    assert all(weight.grad is None for weight in target.model.parameters())


def test_training_beats_the_bare_exit_and_what_it_began_as(target, text, drafter) -> None:
    held_out, _ = split(text, PLAN.held_out)
    trained = measure(target.model, load_trained("kangaroo", drafter, target), held_out)
    bare = measure(target.model, first_layers(target.model, 2), held_out)
    begun = measure(target.model, kangaroo_model(target.model, 2)[0], held_out)
    for better, worse in zip(trained, bare, strict=True):
        assert better > worse + 0.02
    assert trained[1] > begun[1] + 0.02
    card = read_card(drafter)
    assert (card.kind, card.layers, card.shape) == ("kangaroo", (2,), {"layer": 2})


def test_training_goes_on_from_a_finished_adapter(target, text, drafter, tmp_path) -> None:
    held_out, _ = split(text, PLAN.held_out)
    again = kangaroo_learner(target, text, replace(PLAN, layer=0), drafter)
    assert again.layer == 2
    assert again.measure(held_out).sampled == pytest.approx(
        measure(target.model, load_trained("kangaroo", drafter, target), held_out)[1], abs=0.01
    )
    with pytest.raises(InputError, match="exit layer is 2"):
        kangaroo_learner(target, text, replace(PLAN, layer=1), drafter)


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_texts_are_the_targets_and_the_cache_follows(target, drafter, threshold: float) -> None:
    options = {"drafter": str(drafter), "controller": "fixed", "threshold": threshold}
    plain = Outrider(target, "plain")
    for sampling, rule in (({"temperature": 0.0}, "rejection"), ({"temperature": 0.9, "seed": 3}, "invariant")):
        engine = Outrider(target, "kangaroo", options | {"verifier": rule}, strict=True)
        grown = engine.recipe("kangaroo").drafter
        grown.source = Watched(grown.source.target, grown.source.width, "kangaroo")
        drafted = engine.generate(PROMPTS, max_new_tokens=24, **sampling)
        same = plain.generate(PROMPTS, max_new_tokens=24, **sampling)
        assert [g.token_ids for g in drafted] == [g.token_ids for g in same]
        assert sum(g.stats.accepted for g in drafted) > 10
    assert Watched.steps > 30
    sampled = Outrider(target, "kangaroo", options, strict=True).generate(PROMPTS, temperature=1.0, seed=1)
    assert sum(g.stats.accepted for g in sampled) > 5


def test_doubt_ends_a_draft(target, drafter) -> None:
    def drafted(threshold: float) -> tuple[int, int]:
        options = {"drafter": str(drafter), "controller": "fixed", "budget": 4, "threshold": threshold}
        stats = Outrider(target, "kangaroo", options).generate([PROMPTS[0]], max_new_tokens=40)[0].stats
        return stats.drafted, stats.steps

    whole, steps = drafted(0.0)
    assert whole >= 4 * (steps - 4)  # but for the end of the text
    one, steps = drafted(1.01)
    assert one <= steps


def test_a_missing_or_foreign_adapter_is_refused(target, drafter) -> None:
    with pytest.raises(InputError, match="train run --kind kangaroo"):
        Outrider(target, "kangaroo")
    with pytest.raises(InputError, match="trained for"):
        Outrider(load_model(make_target(1).model), "kangaroo", {"drafter": str(drafter)})
    with pytest.raises(InputError, match="exit layer 4"):
        kangaroo_model(target.model, 4)
