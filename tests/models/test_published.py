"""Published EAGLE-3 drafters: what is exported comes back bit for bit, variants are read right or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.api import Outrider
from outrider.core.errors import InputError, UnknownName
from outrider.export import export
from outrider.export.export import drafter_rows
from outrider.export.plain import PlainEagle3
from outrider.models import LoadedModel, hub, load_model
from outrider.models.drafts import CARD, DraftCard, packed, write_drafter
from outrider.models.kept import Kept, keep_tensors
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape, rotary_angles
from outrider.models.published import LAYER_IDS, find_published, read_published, target_name
from outrider.models.trained import load_eagle3

FORMATS = ("vllm", "sglang", "speculators")
LAYERS, VOCAB, SAID = (1, 3, 5), 64, 20
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return load_model(LlamaForCausalLM(config).requires_grad_(False))


def make(target: LoadedModel, place: Path, eight_bits: bool = False, **more: Any) -> Path:
    torch.manual_seed(1)
    shape = Eagle3Shape(32, 4, 2, 8, 48, LAYERS, SAID, theta=5000.0, eps=1e-6, **more)
    net = Eagle3Layer(shape, torch.randperm(VOCAB)[:SAID].sort().values)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)
    card = DraftCard(target.name, target.fingerprint, LAYERS, kind="eagle3", shape=shape.as_dict())
    write_drafter(place, packed(net.tensors(), eight_bits), card)
    return place


def foreign(
    target: LoadedModel, tmp_path: Path, change: Callable[[Config, Tensors], object], form: str = "vllm"
) -> Path:
    """A folder as somebody else might have written it."""
    folder = tmp_path / "published"
    export(make(target, tmp_path / "drafter"), target, form, folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def added(folder: Path, target: LoadedModel) -> Kept:
    return keep_tensors(*read_published(folder, target))


def tree_texts(target: LoadedModel, drafter: Path) -> list[tuple[list[int], list[int]]]:
    """Every tree that a run proposed."""
    trees = []
    with Outrider(
        target, "eagle3", options={"drafter": str(drafter), "controller": "fixed"}, runtime="eager"
    ) as engine:
        drafting = engine.recipe("eagle3", {"drafter": str(drafter), "controller": "fixed"}).drafter
        plain = type(drafting).propose

        def propose(self: Any, *given: Any) -> Any:
            made = plain(self, *given)
            trees.extend((tree.tokens.tolist(), tree.parents.tolist()) for tree in made)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(drafting), "propose", propose)
            for prompt in ([3, 1, 4], [9, 8, 7, 6, 5]):
                engine.generate(prompt, max_new_tokens=12)
    return trees


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_an_exported_drafter_comes_back_bit_for_bit(target, tmp_path, form: str, eight_bits: bool) -> None:
    drafter = make(target, tmp_path / "drafter", eight_bits)
    export(drafter, target, form, tmp_path / "out")
    before, after = load_eagle3(drafter, target), load_eagle3(added(tmp_path / "out", target).folder, target)
    assert before.shape == after.shape and torch.equal(before.ids, after.ids)
    theirs = dict(after.named_parameters())
    assert all(torch.equal(weight, theirs[name]) for name, weight in before.named_parameters())


@pytest.mark.parametrize("form", FORMATS)
def test_an_exported_drafter_proposes_the_same_trees_when_it_is_back(target, tmp_path, form: str) -> None:
    drafter = make(target, tmp_path / "drafter")
    export(drafter, target, form, tmp_path / "out")
    trees = tree_texts(target, drafter)
    assert sum(len(tokens) for tokens, _ in trees) > 40
    assert tree_texts(target, added(tmp_path / "out", target).folder) == trees


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_a_norm_before_the_residual_is_computed_as_the_format_says(target, tmp_path, form: str) -> None:
    folder = foreign(target, tmp_path, lambda config, _: config.update(norm_before_residual=True), form)
    net = load_eagle3(added(folder, target).folder, target)
    embedded, features = torch.randn(9, 32), torch.randn(7, 96)
    found = drafter_rows(net, embedded, features, 3)
    torch.testing.assert_close(found, PlainEagle3(folder).run(embedded, features, 3), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(
        found, drafter_rows(load_eagle3(tmp_path / "drafter", target), embedded, features, 3), atol=0.1
    )
    export(added(folder, target).folder, target, form, tmp_path / "again")
    assert torch.equal(PlainEagle3(tmp_path / "again").run(embedded, features, 3),
                       PlainEagle3(folder).run(embedded, features, 3))  # fmt: skip
    with pytest.raises(InputError, match="norms before the residual"):
        export(added(folder, target).folder, target, "sglang", tmp_path / "refused")


def test_rotary_positions_of_llama_3_are_those_of_transformers(target, tmp_path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    folder = foreign(target, tmp_path, lambda config, _: config.update(rope_parameters=rope))
    net = load_eagle3(added(folder, target).folder, target)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    assert theirs.attention_scaling == 1.0 and not torch.allclose(theirs.inv_freq, 10_000.0 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(
        rotary_angles(torch.arange(100.0), net.shape), torch.arange(100.0)[:, None] * theirs.inv_freq
    )
    with pytest.raises(InputError, match="rotary is scaled"):
        export(added(folder, target).folder, target, "vllm", tmp_path / "again")


def _drop_ids(config: Config) -> None:
    del config[LAYER_IDS]
    del config["eagle_config"]


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        (lambda config, _: config.pop("eagle_config"), LAYERS),
        (lambda config, _: config.pop(LAYER_IDS), LAYERS),  # inside `eagle_config` the outputs are named
        (lambda config, _: _drop_ids(config), (2, 4, 5)),
    ],
)
def test_layer_ids_are_read_where_they_stand_or_are_the_usual_ones(target, tmp_path, change, layers) -> None:
    assert load_eagle3(added(foreign(target, tmp_path, change), target).folder, target).shape.layers == layers


def _whole(config: Config, tensors: Tensors) -> None:
    del config["draft_vocab_size"], tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = torch.randn(VOCAB, 32)


def _shuffled(config: Config, tensors: Tensors) -> None:
    order = torch.randperm(SAID)
    ids = (tensors["d2t"] + torch.arange(SAID))[order]
    tensors["d2t"] = ids - torch.arange(SAID)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def test_a_head_of_the_whole_vocabulary_needs_no_map(target, tmp_path) -> None:
    net = load_eagle3(added(foreign(target, tmp_path, _whole), target).folder, target)
    assert torch.equal(net.ids, torch.arange(VOCAB)) and net.shape.vocab == VOCAB


def test_draft_ids_in_another_order_are_put_in_ours(target, tmp_path) -> None:
    net = load_eagle3(added(foreign(target, tmp_path, _shuffled), target).folder, target)
    before = load_eagle3(tmp_path / "drafter", target)
    assert torch.equal(net.ids, before.ids) and torch.equal(net.lm_head.weight, before.lm_head.weight)


def test_what_a_loader_may_add_is_left_out(target, tmp_path) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        config["architectures"] = ["LlamaForCausalLM"]  # as the paper's drafter_rows checkpoints say
        tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.bfloat16()
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    kept = added(foreign(target, tmp_path, change), target)
    assert (
        load_file(kept.folder / "model.safetensors").keys() == load_file(tmp_path / "drafter/model.safetensors").keys()
    )


def test_weights_keep_their_precision_and_may_come_in_parts_or_in_torchs_format(target, tmp_path) -> None:
    folder = tmp_path / "published"
    export(make(target, tmp_path / "drafter"), target, "vllm", folder, dtype=torch.bfloat16)
    whole = added(folder, target)
    stored = load_file(folder / "model.safetensors")
    assert load_file(whole.folder / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    (folder / "model.safetensors").unlink()
    torch.save(stored, folder / "pytorch_model.bin")
    assert added(folder, target).name == whole.name  # a digest of the tensors
    (folder / "pytorch_model.bin").unlink()
    names = sorted(stored)
    for i in range(2):
        save_file({name: stored[name] for name in names[i::2]}, folder / f"model-0000{i}-of-00002.safetensors")
    assert added(folder, target).name == whole.name


def _set(**changes: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update(changes)


def _tensor(name: str, value: torch.Tensor | None) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(num_hidden_layers=2), "it has 2 layers"),
        (_tensor("layers.1.mlp.up_proj.weight", torch.zeros(48, 32)), "several layers"),
        (_set(attention_bias=True), "its attention has biases"),
        (_tensor("midlayer.self_attn.q_proj.bias", torch.zeros(32)), "biases .midlayer.self_attn.q_proj.bias"),
        (_tensor("midlayer.self_attn.q_norm.weight", torch.ones(8)), "not of the format: midlayer.self_attn.q_norm"),
        (_tensor("midlayer.hidden_norm.weight", None), "lacks midlayer.hidden_norm.weight"),
        (_tensor("fc.weight", torch.zeros(32, 64)), r"fc.weight has the shape \(32, 64\)"),
        (_tensor("norm.weight", torch.ones(32, dtype=torch.float64)), "norm.weight is stored as torch.float64"),
        (_tensor("lm_head.weight", None), "has no lm_head.weight"),
        (_tensor("d2t", None), "its head says 20 tokens, the target 64, and there is no d2t"),
        (_tensor("d2t", torch.full((SAID,), 60)), "leads to token 79, the target has 0..63"),
        (_tensor("d2t", -torch.arange(SAID)), "one token twice"),
        (_tensor("t2d", torch.ones(VOCAB, dtype=torch.bool)), "t2d names other tokens"),
        (_tensor("embed_tokens.weight", torch.ones(VOCAB, 32)), "embeddings are not those of"),
        (_set(hidden_size=64), "its hidden size is 64, that of .* 32"),
        (_set(target_hidden_size=48), "its hidden size is 48"),
        (_set(vocab_size=128), "its vocabulary is 128"),
        (_set(draft_vocab_size=21), "its head says 20 tokens, config.json 21"),
        (_set(**{LAYER_IDS: [1, 2, 9]}), r"layers 1, 2, 9; the target has 0\.\.8"),
        (_set(norm_output=True), "goes on from normed states"),
        (_set(norm_before_fc=True), "norms the features"),
        (_set(hidden_act="gelu"), "gated by gelu"),
        (_set(model_type="gemma2"), "one of gemma2"),
        (_set(logit_scale=0.5), "scaled by 0.5"),
        (_set(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "of the type yarn"),
        (_set(rope_parameters={"rope_type": "llama3", "factor": 4.0}), "rotary lacks low_freq_factor"),
        (_set(eagle_config={"use_aux_hidden_state": False}), "EAGLE-1 and EAGLE-2"),
        (_set(architectures=["MedusaModel"]), "it is MedusaModel; only EAGLE-3"),
        (_set(speculators_model_type="eagle"), "it is eagle; only EAGLE-3"),
        (lambda config, _: config.pop("intermediate_size"), "lacks 'intermediate_size'"),
        (_set(eagle_config=[1, 2]), "config.json cannot be used"),
        (_set(transformer_layer_config="llama"), "config.json cannot be used"),
    ],
)  # fmt: skip
def test_what_would_be_computed_differently_is_refused_with_the_reason(target, tmp_path, change, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_published(foreign(target, tmp_path, change), target)


def test_a_folder_that_cannot_be_read_is_refused_in_one_line(target, tmp_path) -> None:
    with pytest.raises(InputError, match=f"neither {CARD} nor config.json"):
        read_published(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        read_published(tmp_path, target)
    folder = foreign(target, tmp_path, lambda config, tensors: None)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"model.safetensors cannot be read"):
        read_published(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights"):
        read_published(folder, target)


def test_a_speculators_folder_names_its_target(target, tmp_path) -> None:
    export(make(target, tmp_path / "drafter"), target, "speculators", tmp_path / "one", verifier="owner/model")
    export(tmp_path / "drafter", target, "vllm", tmp_path / "two")
    assert (target_name(tmp_path / "one"), target_name(tmp_path / "two")) == ("owner/model", "")


def test_a_hub_id_is_fetched_from_the_hub_and_only_what_is_needed(target, tmp_path, monkeypatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **given: Any) -> str:
        asked.append({"name": name, **given})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    assert find_published("owner/drafter", "main") == tmp_path
    assert asked[0]["name"] == "owner/drafter" and asked[0]["revision"] == "main" and not asked[0]["local_files_only"]
    assert [one["allow_patterns"][1] for one in asked] == ["*.safetensors", "pytorch_model*.bin"]
    (tmp_path / "model.safetensors").touch()
    asked.clear()
    find_published("owner/drafter")
    assert len(asked) == 1
    assert find_published(str(tmp_path)) == tmp_path and len(asked) == 1


def test_a_hub_that_cannot_be_reached_and_a_wrong_name_are_told_apart(tmp_path, monkeypatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", missing)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with pytest.raises(UnknownName, match=r"could not be reached and it is not in the local cache; a local folder"):
        find_published("owner/drafter")
    monkeypatch.setattr(hub, "reachable", lambda: True)
    with pytest.raises(UnknownName, match="no such repository"):
        find_published("owner/drafter")
    with pytest.raises(InputError, match="no folder"):
        find_published(str(tmp_path / "nothing" / "here"))
