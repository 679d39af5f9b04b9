"""Tensors read one by one are those that `transformers` loads, and what is packed from them is what it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import LlamaForCausalLM
from transformers.integrations.ggml import _gguf_parse_value

import outrider
from outrider.core.errors import UnsupportedModel
from outrider.models import known
from outrider.models.files import tensors
from outrider.models.files.skeleton import Skeleton, of_folder, of_gguf
from outrider.models.gguf_file import read_header
from outrider.models.known import open_model
from outrider.models.load import fingerprint, load_model
from outrider.runtime.native import held, packing
from outrider.runtime.native.model import weights_of
from outrider.runtime.native.packing import pack_files
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf

ABOUT = {"model": "tiny"}


@pytest.fixture(params=["whole", "quantised", "tied"])
def gguf(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tiny_gguf_model(request.param == "tied"), tmp_path / "tiny.gguf", packed=request.param == "quantised")
    return tmp_path / "tiny.gguf"


def built(path: Path) -> Skeleton:
    made = of_gguf(path)
    assert made is not None
    return made


def arrays(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Those of named tuples in each other, by their paths."""
    for field, value in part._asdict().items():
        if isinstance(value, tuple):
            yield from arrays(value, f"{name}{field}.")
        else:
            yield f"{name}{field}", value


def test_any_rows_of_a_gguf_file_are_those_of_the_model(gguf: Path) -> None:
    skeleton, model = built(gguf), load_model(gguf, device="cpu").model
    for name, weight in model.named_parameters():
        rows = skeleton.tensors.rows(name, 0, len(weight))
        assert np.array_equal(rows, weight.numpy()), name
        low, high = len(weight) // 3, len(weight) // 2
        assert np.array_equal(skeleton.tensors.rows(name, low, high), weight[low:high].numpy()), name


def test_rotary_pairs_read_in_the_order_of_the_file_are_seen(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "INTERLEAVED", ())
    with pytest.raises(AssertionError):
        test_any_rows_of_a_gguf_file_are_those_of_the_model(gguf)


def test_the_fingerprint_is_that_of_the_whole_model(gguf: Path) -> None:
    whole = load_model(gguf, device="cpu")
    assert built(gguf).fingerprint() == fingerprint(whole.model) == open_model(gguf).fingerprint
    described = open_model(gguf)
    assert (described.name, described.eos_ids) == (whole.name, whole.eos_ids)


@pytest.mark.parametrize("bits", [8, 4, 32])
def test_packed_from_files_is_packed_from_the_model(gguf: Path, tmp_path: Path, bits: int) -> None:
    precision = {32: "float32", 8: "int8", 4: "int4"}[bits]
    pack_files(tmp_path / "packed", built(gguf), precision, ABOUT)
    found = held.read(tmp_path / "packed")
    assert found is not None
    wanted = dict(arrays(weights_of(load_model(gguf, device="cpu").model, bits)))
    mine = dict(arrays(found.weights))
    assert mine.keys() == wanted.keys()
    for name, array in wanted.items():
        assert mine[name].dtype == array.dtype and np.array_equal(mine[name], array), name


@pytest.mark.parametrize("bits", [8, 32])
def test_a_large_matrix_is_packed_in_stretches(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    monkeypatch.setattr(packing, "SOME", 8 * 32)
    test_packed_from_files_is_packed_from_the_model(gguf, tmp_path, bits)


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_an_embedding_that_is_the_head_lies_on_the_disk_once(gguf: Path, tmp_path: Path, precision: str) -> None:
    skeleton = built(gguf)
    pack_files(tmp_path / "packed", skeleton, precision, ABOUT)
    weights = held.read(tmp_path / "packed").weights  # type: ignore[union-attr]
    assert np.shares_memory(weights.embedding.values, weights.head.values) == skeleton.tied
    assert weights.embedding.values.dtype == (np.float32 if precision == "float32" else np.int8)


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_weights_in_huge_pages_are_those_on_the_disk_and_are_never_let_go(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    monkeypatch.setattr(held, "HUGE_PAGES", tmp_path / "setting")
    if setting is not None:
        (tmp_path / "setting").write_text(setting, encoding="ascii")
    pack_files(tmp_path / "packed", built(gguf), "int8", ABOUT)
    index = json.loads((tmp_path / "packed" / held.FACTS).read_text(encoding="utf-8"))["arrays"]
    monkeypatch.setattr(held, "READ", 1000)  # in several pieces
    found = held.read(tmp_path / "packed")
    assert found is not None
    wanted = dict(arrays(held.mapped(tmp_path / "packed" / held.ARRAYS, index)))
    for name, array in arrays(found.weights):
        held.unread(array)
        assert np.array_equal(array, wanted[name]), name


def test_a_header_is_read_as_transformers_reads_it(gguf: Path) -> None:
    theirs, mine = GGUFReader(gguf), read_header(gguf, facts=True)

    def values(field: Any) -> list[Any]:
        return [_gguf_parse_value(field.parts[at], field.types) for at in field.data]

    names = [name for name in theirs.fields if not name.startswith("GGUF.")]  # what its reader adds
    assert list(mine.facts) == names and "tokenizer.ggml.merges" in names
    for name in names:
        assert values(mine.facts[name]) == values(theirs.fields[name]), name
    assert list(mine.tensors) == [tensor.name for tensor in theirs.tensors]
    assert not read_header(gguf).facts


def test_weights_that_are_packed_wrongly_do_not_pass_and_are_not_kept(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = packing.checked

    def torn(model: Any, weights: Any, precision: str) -> Any:
        weights.gate.values[0, 0] = 0  # what the step reads; the model reads what it should be
        return right(model, weights, precision)

    monkeypatch.setattr(
        "outrider.runtime.native.model.unpack", lambda values, _: np.full((8192, 8192), 0.01, np.float32)
    )
    monkeypatch.setattr(packing, "checked", torn)
    with pytest.raises(UnsupportedModel, match="scores a tree differently"):
        pack_files(tmp_path / "packed", built(gguf), "float32", ABOUT)
    assert held.read(tmp_path / "packed") is None


def test_a_quantised_file_starts_without_a_float32_copy_on_the_disk(gguf: Path, tmp_path: Path) -> None:
    with outrider.load(gguf, method="plain", runtime="native", precision="int8") as engine:
        ids = engine.generate([[3, 4, 5]], max_new_tokens=6)[0].token_ids
        assert not engine.loaded.in_memory
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    whole = load_model(gguf, device="cpu")
    with outrider.load(whole.model, method="plain", runtime="native", precision="int8") as engine:
        assert engine.generate([[3, 4, 5]], max_new_tokens=6, stop_token_ids=list(whole.eos_ids))[0].token_ids == ids


def test_a_folder_whose_tensors_are_not_those_of_the_model_is_read_as_a_whole(tmp_path: Path) -> None:
    model: LlamaForCausalLM = tiny_gguf_model()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / tensors.INDEX).is_file() and of_folder(tmp_path) is not None
    config = model.config
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path)
    assert of_folder(tmp_path) is None


def test_what_cannot_be_read_piece_by_piece_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_gguf_model().to(torch.float64).save_pretrained(tmp_path / "model", safe_serialization=True)
    monkeypatch.setattr(known, "of_folder", lambda _: (_ for _ in ()).throw(ValueError("planted")))
    loaded = open_model(tmp_path / "model")
    assert loaded.in_memory and loaded.tokenizer is None
