"""Drafts of a target's own layers: nothing but the layers and the norm is theirs, and only their target takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.errors import InputError
from outrider.models import LoadedModel
from outrider.models.drafts import (
    CARD,
    WEIGHTS,
    DraftCard,
    drafter_parameters,
    load_draft,
    new_draft,
    read_card,
    save_draft,
    shipped_draft,
)
from outrider.models.truncate import chosen_layers, first_layers

TOKENS = torch.tensor([[1, 5, 9, 33, 2, 60]])


@pytest.fixture
def saved(tiny_llama: LoadedModel, tmp_path: Path) -> Path:
    card = DraftCard(tiny_llama.name, tiny_llama.fingerprint, (1, 0), licence="Apache-2.0")
    save_draft(tmp_path, new_draft(tiny_llama, (1, 0)), card)
    return tmp_path


def test_an_untrained_draft_is_the_chosen_layers(tiny_llama: LoadedModel) -> None:
    model = tiny_llama.model
    torch.testing.assert_close(chosen_layers(model, (0, 1))(TOKENS).logits, model(TOKENS).logits)
    torch.testing.assert_close(new_draft(tiny_llama, (0,))(TOKENS).logits, first_layers(model, 1)(TOKENS).logits)
    swapped = chosen_layers(model, (1, 0))
    assert swapped.model.layers[0].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight
    assert [layer.self_attn.layer_idx for layer in swapped.model.layers] == [0, 1]  # its place in its own cache
    assert not torch.allclose(swapped(TOKENS).logits, model(TOKENS).logits)


def test_a_draft_owns_its_layers_and_norm_and_shares_the_rest(tiny_llama: LoadedModel, saved: Path) -> None:
    model = tiny_llama.model
    for draft in (new_draft(tiny_llama, (1, 0)), load_draft(saved, tiny_llama)):
        owned = drafter_parameters(draft)
        assert set(owned) == {n for n, _ in draft.named_parameters() if "layers." in n or n == "model.norm.weight"}
        theirs = {id(weight) for weight in model.parameters()}
        assert not any(id(weight) in theirs for weight in owned.values())
        assert draft.model.embed_tokens.weight is model.model.embed_tokens.weight
        assert draft.lm_head.weight is model.lm_head.weight
    assert set(load_file(saved / WEIGHTS)) == set(owned)


def test_a_saved_draft_comes_back(tiny_llama: LoadedModel, saved: Path) -> None:
    card = read_card(saved)
    assert (card.layers, card.licence) == ((1, 0), "Apache-2.0")
    before, after = drafter_parameters(new_draft(tiny_llama, (1, 0))), drafter_parameters(load_draft(saved, tiny_llama))
    assert all(torch.equal(after[name], weight.half().float()) for name, weight in before.items())
    assert sorted(p.name for p in saved.iterdir()) == [CARD, WEIGHTS]


def test_a_draft_for_another_target_is_refused(tiny_llama: LoadedModel, saved: Path) -> None:
    with pytest.raises(InputError, match="trained for .* not for .*outrider train distill"):
        load_draft(saved, replace(tiny_llama, fingerprint="0" * 16))


def test_a_damaged_folder_is_refused_in_one_line(tiny_llama: LoadedModel, saved: Path) -> None:
    weights = load_file(saved / WEIGHTS)
    save_file({name: weight for name, weight in weights.items() if "norm" in name}, saved / WEIGHTS)
    with pytest.raises(InputError, match="does not hold the layers"):
        load_draft(saved, tiny_llama)
    (saved / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        load_draft(saved, tiny_llama)
    (saved / CARD).write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match="another format"):
        read_card(saved)
    (saved / CARD).write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        read_card(saved)
    with pytest.raises(InputError, match="no draft here"):
        read_card(saved / "elsewhere")


def test_layers_that_do_not_exist_are_refused(tiny_llama: LoadedModel) -> None:
    for layers in ((), (2,), (-1,)):
        with pytest.raises(InputError, match="0..1"):
            chosen_layers(tiny_llama.model, layers)


def test_the_package_ships_a_draft_for_the_embedded_model_only(smollm2: LoadedModel, tiny_llama: LoadedModel) -> None:
    folder = shipped_draft(smollm2)
    assert folder is not None and shipped_draft(tiny_llama) is None
    assert sum(path.stat().st_size for path in folder.iterdir()) < 40_000_000
    assert "Apache-2.0" in read_card(folder).licence


def test_the_shipped_draft_agrees_with_the_embedded_model_far_more_than_its_layers_did(smollm2: LoadedModel) -> None:
    folder = shipped_draft(smollm2)
    assert folder is not None and smollm2.tokenizer is not None
    messages = [{"role": "user", "content": "Explain why the sky is blue."}]
    ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    row = smollm2.model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)
    said = slice(len(ids) - 1, -1)
    wanted = smollm2.model(row).logits[0, said].argmax(-1)
    drafts = load_draft(folder, smollm2), new_draft(smollm2, read_card(folder).layers)
    trained, untrained = (float((d(row).logits[0, said].argmax(-1) == wanted).float().mean()) for d in drafts)
    assert trained > 0.25 > 0.05 > untrained
