"""Exported folders: an independent forward and the package `speculators` agree with the drafter, or none is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from outrider.cli import app
from outrider.core.errors import InputError, UnknownName
from outrider.export import export, formats
from outrider.export.export import HOT_TOKENS, drafter_rows
from outrider.export.plain import PlainEagle3
from outrider.models import LoadedModel, load_model
from outrider.models.drafts import DraftCard, packed, write_drafter
from outrider.models.networks.eagle3 import Eagle3Layer, Eagle3Shape
from outrider.models.trained import load_eagle3

LAYERS = (1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(folder, device="cpu")


def make(target: LoadedModel, place: Path, layers: tuple[int, ...] = LAYERS, eight_bits: bool = False) -> Path:
    torch.manual_seed(1)
    shape = Eagle3Shape(32, 4, 2, 8, 48, layers, 20, theta=5000.0, eps=1e-6)
    net = Eagle3Layer(shape, torch.randperm(64)[:20].sort().values)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)
    card = DraftCard(target.name, target.fingerprint, layers, kind="eagle3", shape=shape.as_dict())
    write_drafter(place, packed(net.tensors(), eight_bits), card)
    return place


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators"])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_the_written_folder_gives_the_drafters_logits(target, tmp_path, form: str, eight_bits: bool) -> None:
    drafter = make(target, tmp_path / "drafter", eight_bits=eight_bits)
    made = export(drafter, target, form, tmp_path / "out")
    assert made.difference < 1e-5 * made.largest and made.largest > 0.5
    net = load_eagle3(drafter, target)
    plain = PlainEagle3(tmp_path / "out")
    embedded, features = torch.randn(9, 32), torch.randn(7, 96)
    torch.testing.assert_close(
        plain.run(embedded, features, 3), drafter_rows(net, embedded, features, 3), atol=1e-5, rtol=1e-4
    )
    assert torch.equal(plain.ids, net.ids) and plain.t2d.sum() == 20
    assert (tmp_path / "out" / HOT_TOKENS).exists() == (form == "sglang")
    assert {path.name for path in tmp_path.iterdir()} == {"drafter", "out"}


def test_layer_ids_follow_each_engines_convention(target, tmp_path) -> None:
    export(make(target, tmp_path / "drafter"), target, "sglang", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]  # vLLM: the input of layer i
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # SGLang adds one
    assert config["num_aux_hidden_states"] == 3 and config["vocab_size"] == 64 and config["draft_vocab_size"] == 20
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert torch.equal(torch.load(tmp_path / "out" / HOT_TOKENS), load_eagle3(tmp_path / "drafter", target).ids)
    with pytest.raises(InputError, match="--layers"):
        export(make(target, tmp_path / "low", (0, 1, 2)), target, "vllm", tmp_path / "refused")


@pytest.mark.parametrize(
    "bug", ["another order of halves", "a transposed matrix", "ids instead of offsets", "an unknown name", "no t2d"]
)
def test_a_wrong_folder_is_refused_and_nothing_is_left(target, tmp_path, monkeypatch, bug: str) -> None:
    right = formats.tensors

    def wrong(net, *rest):
        made = right(net, *rest)
        query = next(name for name in made if "q_proj" in name)
        if bug == "another order of halves":
            made[query] = made[query].roll(32, 1).contiguous()
        elif bug == "a transposed matrix":
            made["midlayer.self_attn.o_proj.weight"] = made["midlayer.self_attn.o_proj.weight"].T.contiguous()
        elif bug == "ids instead of offsets":
            made["d2t"] = net.ids.clone()
        elif bug == "an unknown name":
            made["model.norm.weight"] = made.pop("norm.weight")
        else:
            del made["t2d"]
        return made

    monkeypatch.setattr(formats, "tensors", wrong)
    drafter = make(target, tmp_path / "drafter")
    with pytest.raises(InputError, match="nothing was written|not the tensors"):
        export(drafter, target, "vllm", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"drafter"}


def test_half_precision_is_compared_with_weights_rounded_alike(target, tmp_path) -> None:
    made = export(make(target, tmp_path / "drafter"), target, "vllm", tmp_path / "out", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16 and stored["d2t"].dtype == torch.int64
    assert made.difference < 1e-5 * made.largest


def test_what_cannot_be_exported_is_refused(target, tmp_path) -> None:
    drafter = make(target, tmp_path / "drafter")
    with pytest.raises(UnknownName, match="known formats: vllm"):
        export(drafter, target, "tgi", tmp_path / "out")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(InputError, match="not empty"):
        export(drafter, target, "vllm", full)
    card = DraftCard(target.name, target.fingerprint, (0,), kind="medusa")
    write_drafter(tmp_path / "other", {"x": torch.zeros(1)}, card)
    with pytest.raises(InputError, match="kind medusa"):
        export(tmp_path / "other", target, "vllm", tmp_path / "out")
    write_drafter(tmp_path / "stranger", {"x": torch.zeros(1)}, DraftCard("x", "1234", LAYERS, kind="eagle3"))
    with pytest.raises(InputError, match="trained for"):
        export(tmp_path / "stranger", target, "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(target, folder, tmp_path) -> None:
    drafter = make(target, tmp_path / "drafter")
    line = ["export", "--drafter", str(drafter), "--model", str(folder), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*line, "--to", "vllm", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["layers"] == [1, 2, 3] and (tmp_path / "out" / "config.json").exists()
    again = CliRunner().invoke(app, [*line, "--to", "vllm"])
    assert again.exit_code == 2 and "not empty" in again.output
    assert "use one of" in CliRunner().invoke(app, [*line, "--to", "tgi"]).output


def test_the_speculators_package_loads_it_and_computes_the_same(target, folder, tmp_path) -> None:
    pytest.importorskip("speculators", reason="the package `speculators` is not installed")
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason="`speculators` lacks one of its own dependencies")

    drafter = make(target, tmp_path / "drafter")
    export(drafter, target, "speculators", tmp_path / "out", verifier=str(folder))
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(str(tmp_path / "out"))
    config.transformer_layer_config._attn_implementation = "eager"
    model = eagle3.Eagle3DraftModel.from_pretrained(str(tmp_path / "out"), config=config).float().eval()
    assert model.target_layer_ids == [1, 2, 3] and not model.lm_head.weight.isnan().any()
    # Some pairs of versions leave the embeddings, which the folder does not hold, as they find the memory.
    model.embed_tokens.load_state_dict(target.model.get_input_embeddings().state_dict())
    net = load_eagle3(drafter, target)
    assert torch.equal(model.d2t + torch.arange(20), net.ids) and torch.equal(model.t2d.nonzero()[:, 0], net.ids)
    tokens, features = torch.randint(64, (1, 11)), torch.randn(1, 11, 96)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    with torch.no_grad():
        model(features, tokens, torch.zeros(1, 11, dtype=torch.long), ttt_steps=2)
        embedded = target.model.get_input_embeddings()(tokens[0])
        for place in range(1, 10):  # its step s at column t goes on from true features up to t with the tokens behind
            mine = drafter_rows(net, embedded[: place + 2], features[0, : place + 1], 2)
            for step in range(2):
                torch.testing.assert_close(seen[step][0, place], mine[step], atol=1e-4, rtol=1e-3)


def test_a_folder_that_lost_a_tensor_is_not_run(target, tmp_path) -> None:
    export(make(target, tmp_path / "drafter"), target, "vllm", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    save_file({name: tensor for name, tensor in stored.items() if "hidden_norm" not in name}, file)
    with pytest.raises(InputError, match="midlayer.hidden_norm.weight"):
        PlainEagle3(tmp_path / "out")
