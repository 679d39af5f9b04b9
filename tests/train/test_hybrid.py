"""A hybrid of a model: what is not replaced is the model's, what is replaced learns from it, and it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel, load_model
from outrider.train.hybrid import AlignLearner, HybridPlan, hybrid_of, train_hybrid
from outrider.train.losses import LOSSES
from tests.drafters import some_text

TOKENS = torch.tensor([[1, 5, 9, 3, 7, 11]])


def test_all_that_is_not_replaced_is_the_models_to_the_bit(tiny_llama: LoadedModel) -> None:
    made = hybrid_of(tiny_llama, (1,))
    with torch.no_grad():
        mine = made(TOKENS, output_hidden_states=True).hidden_states
        theirs = tiny_llama.model(TOKENS, output_hidden_states=True).hidden_states
    assert torch.equal(mine[1], theirs[1]) and not torch.equal(mine[2], theirs[2])
    assert made.get_output_embeddings().weight.equal(tiny_llama.model.get_output_embeddings().weight)


def test_layers_are_named_one_by_one_and_not_all(tiny_llama: LoadedModel) -> None:
    for layers in ((), (2,), (0, 1)):
        with pytest.raises(InputError, match="layers"):
            hybrid_of(tiny_llama, layers)


def test_alignment_learns_what_the_attention_gives(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    """A layer that gives nothing misses all; one whose products are those of attention misses less."""
    data = some_text(tiny_llama, tmp_path / "text")
    draft = hybrid_of(tiny_llama, (1,))
    learner = AlignLearner(tiny_llama.model, draft, LOSSES["kl"], (1,))
    for weight in learner.weights.values():
        weight.requires_grad_(True)
    begun = float(learner.backward(data))
    optimizer = torch.optim.Adam(learner.weights.values(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        last = learner.backward(data)
        optimizer.step()
    draft.model.layers[1].mamba.out_proj.weight.data.zero_()
    draft.model.layers[1].mamba.out_proj.bias.data.zero_()
    assert float(learner.backward(data)) == pytest.approx(1.0, abs=1e-4)
    assert float(last) < 0.9 * begun and float(last) < 1.0


def test_a_trained_hybrid_loads_like_every_model_and_drafts_leave_its_text_as_it_is(
    tiny_llama: LoadedModel, tmp_path: Path
) -> None:
    data = some_text(tiny_llama, tmp_path / "text")
    plan = HybridPlan(steps=4, align=4, batch=4, held_out=4, layers=(1,))
    made, told = train_hybrid(tiny_llama, data, plan, tmp_path / "hybrid", measure_every=2)
    assert told["layers"] == (1,) and 0 <= told["distilled"]["greedy"] <= 1
    loaded = load_model(str(tmp_path / "hybrid"), device="cpu")
    assert torch.equal(loaded.model(TOKENS).logits, made(TOKENS).logits)
    engine = Outrider(loaded, "plain", strict=True, limits={"max_slots": 2})
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    texts = [
        engine.engine.submit([1, 2, 3, 1, 2], params, engine.recipe(method, options)).result().token_ids
        for method, options in (("plain", {}), ("mix", {}), ("stree", {"layers": 1}))
    ]
    assert texts[0] == texts[1] == texts[2]
