"""Every way to name a model ends in the same kind of LoadedModel; every mistake in one line with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from outrider.core.errors import InputError, OutriderError, UnknownName, UnsupportedModel
from outrider.models import LoadedModel, convert, hub, load, load_model, same_vocabulary
from tests.models.tiny_gguf import WORDS, tiny_gguf_model, write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "reachable", lambda timeout=3.0: False)


def test_the_embedded_model_by_name(smollm2: LoadedModel) -> None:
    assert smollm2.name == "smollm2"
    assert smollm2.model.dtype == torch.float32
    assert not smollm2.model.training
    assert not any(p.requires_grad for p in smollm2.model.parameters())
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    assert smollm2.eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("x").input_ids == tokenizer("x", add_special_tokens=False).input_ids


@torch.no_grad()
def test_the_embedded_model_knows_something(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert smollm2.tokenizer.decode(smollm2.model(ids).logits[0, -1].argmax()) == " Paris"


def test_a_folder(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    folder = tmp_path / "mine"
    tiny_llama.model.save_pretrained(folder)
    loaded = load_model(folder, device="cpu")
    assert loaded.name == "mine"
    assert loaded.tokenizer is None
    assert loaded.eos_ids == {2}
    assert loaded.fingerprint == tiny_llama.fingerprint
    assert torch.equal(loaded.model.lm_head.weight, tiny_llama.model.lm_head.weight)
    assert load_model(str(folder), device="cpu", dtype="bf16").model.dtype == torch.bfloat16


def test_the_fingerprint_knows_weights_but_not_precision(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    tiny_llama.model.save_pretrained(tmp_path)
    half = load_model(tmp_path, device="cpu", dtype="bfloat16")
    assert half.fingerprint == tiny_llama.fingerprint
    half.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert load.fingerprint(half.model) != tiny_llama.fingerprint


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "q4_1"])
@torch.no_grad()
def test_a_gguf_file(tmp_path: Path, cache: Path, packed: bool) -> None:
    model = tiny_gguf_model()
    file = tmp_path / "mine.gguf"
    write_gguf(model, file, packed)
    loaded = load_model(file, device="cpu")
    assert loaded.name == "mine"
    assert loaded.eos_ids == {2}
    ids = torch.tensor([[3, 4, 5, 20, 9]])
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template is not None
    assert loaded.tokenizer("abc").input_ids[-2:] == [WORDS.index("ab"), WORDS.index("c")]
    [folder] = [p for p in cache.iterdir() if p.is_dir()]
    dense = AutoModelForCausalLM.from_pretrained(folder)
    assert type(dense.model.layers[0].mlp.up_proj) is torch.nn.Linear
    file_time = (folder / "model.safetensors").stat().st_mtime_ns
    load_model(file, device="cpu")
    assert (folder / "model.safetensors").stat().st_mtime_ns == file_time, "converted once"


def test_a_loaded_model_stays_as_it_is(tiny_llama: LoadedModel) -> None:
    model = LlamaForCausalLM(tiny_llama.model.config).to(torch.bfloat16).train()
    loaded = load_model(model)
    assert loaded.model is model
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert loaded.tokenizer is None
    assert all(p.requires_grad for p in model.parameters()), "its training state is the caller's business"
    assert load_model(model, dtype="float32").model.dtype == torch.float32


def test_a_loaded_model_brings_its_tokenizer(smollm2: LoadedModel) -> None:
    again = load_model(smollm2.model)
    assert again.tokenizer is not None
    assert again.tokenizer.get_vocab() == smollm2.tokenizer.get_vocab()
    marker = object()
    assert load_model(smollm2.model, tokenizer=marker).tokenizer is marker  # type: ignore[arg-type]


def test_eos_ids_follow_the_generation_config(tiny_llama: LoadedModel) -> None:
    model = LlamaForCausalLM(tiny_llama.model.config)
    model.generation_config.eos_token_id = [5, 7]
    assert load_model(model).eos_ids == {5, 7}
    model.generation_config.eos_token_id = None
    assert load_model(model).eos_ids == {2}, "else the config's"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["nobody/nothing", "smollm"])
def test_unknown_model_offline_names_the_embedded_one(name: str) -> None:
    with pytest.raises(UnknownName, match=rf"no model '{name}': the hub .* could not be reached.*'smollm2' works"):
        load_model(name)


def test_a_hub_that_answers_no_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("nobody/nothing is not a valid model identifier\nlisted on the hub")

    monkeypatch.setattr(hub, "reachable", lambda timeout=3.0: True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(UnknownName, match="is not a valid model identifier; the embedded"):
        load_model("nobody/nothing")


def test_reachable_asks_once_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.reachable(timeout=1) is False


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./no/such/folder", "no folder './no/such/folder'"),
        ("missing.gguf", "no file 'missing.gguf'"),
        ("two words", "no folder 'two words'"),
        ("", "no folder ''"),
        (__file__, "is a file; give a model folder"),
    ],
)
def test_bad_sources_are_named(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "no device 'gpu'; use cpu"),
        ({"device": "cuda:77"}, "device 'cuda:77' is not on this machine"),
        ({"dtype": "int3"}, "no dtype 'int3'; use one of float32, bfloat16, float16, float64"),
        ({"dtype": torch.int8}, "no dtype 'torch.int8'"),
        ({"revision": "main"}, "revision"),
    ],
)
def test_bad_options_are_named(tiny_llama: LoadedModel, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(tiny_llama.model, **options)  # type: ignore[arg-type]


def test_a_broken_folder_is_one_line(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    no_weights = tmp_path / "no-weights"
    tiny_llama.model.config.save_pretrained(no_weights)
    torn = tmp_path / "torn"
    tiny_llama.model.save_pretrained(torn)
    (torn / "model.safetensors").write_bytes(b"\x00" * 100)
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "config.json").write_text("{ not json")
    for folder in (empty, no_weights, torn, junk):
        with pytest.raises(OutriderError, match=folder.name) as caught:
            load_model(folder, device="cpu")
        assert "\n" not in str(caught.value)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="no causal language model"):
        load_model(tmp_path)


def test_own_code_needs_consent(tmp_path: Path) -> None:
    names = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-my-own", "auto_map": names}))
    (tmp_path / "mine.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(InputError, match="trust_remote_code=True"):
        load_model(tmp_path)


def test_vocabularies_are_compared(tmp_path: Path, cache: Path, smollm2: LoadedModel, tiny_llama: LoadedModel) -> None:
    write_gguf(tiny_gguf_model(), tmp_path / "mine.gguf", packed=False)
    other = load_model(tmp_path / "mine.gguf", device="cpu")
    assert same_vocabulary(smollm2, smollm2) and same_vocabulary(tiny_llama, tiny_llama)
    assert not same_vocabulary(smollm2, other)
    with pytest.raises(InputError, match="64 tokens and 'smollm2' has 49152"):
        same_vocabulary(smollm2, tiny_llama)
