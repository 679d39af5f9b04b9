"""Conversions for OpenVINO: refused where they cannot be, checked, kept on disk, and made again when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

pytest.importorskip("openvino", reason="the extra outrider[openvino] is not installed")

from outrider.core.errors import UnsupportedModel
from outrider.models.load import fingerprint
from outrider.runtime import choice, conversions
from outrider.runtime.conversions import openvino_graph
from outrider.runtime.openvino.backend import OpenVINOBackend
from outrider.runtime.openvino.convert import PRECISIONS, trace
from outrider.runtime.probe import probe
from outrider.runtime.targets import openvino_target
from outrider.runtime.thresholds import moved_near
from tests.runtime import test_architectures as zoo
from tests.runtime.openvino.test_backend import small_llama, small_llama_graphs


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_late_window_is_met_by_the_check_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**{**zoo.COMMON, "max_position_embeddings": 500, "sliding_window": 300})
    windowed = MistralForCausalLM(config).eval()
    graph = trace(windowed, probe(windowed))
    before = openvino_target(windowed, graph, max_slots=2, self_test=True).backend._facts.rules
    assert [size for _, size in before] == [300] and windowed.config.sliding_window == 300
    stale = lambda backend, context: moved_near(backend.model, context)  # noqa: E731  the graph's masks stay
    monkeypatch.setattr(OpenVINOBackend, "thresholds_near", stale)
    with pytest.raises(UnsupportedModel, match="sliding_window 300 reached.*use runtime eager"):
        openvino_target(windowed, graph, max_slots=2, self_test=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_llama_graphs()[0]


def test_what_cannot_be_converted_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedModel, match="experts at run time.*runtime eager"):
        probe(zoo.build("mixtral"))
    with pytest.raises(UnsupportedModel, match="runtime eager"):
        probe(zoo.build("falcon-alibi"))
    with pytest.raises(UnsupportedModel, match=r"storage order \(a table of positions.*runtime eager"):
        probe(zoo.build("bart"))
    with pytest.raises(UnsupportedModel, match="dtype='float32'"):
        probe(LlamaForCausalLM(LlamaConfig(**zoo.COMMON)).eval().bfloat16())


def test_a_graph_that_scores_otherwise_is_refused(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def louder(model: Any, known: Any) -> Any:
        torch.manual_seed(1)
        other = LlamaForCausalLM(model.config).eval()
        return trace(other, known)

    monkeypatch.setattr("outrider.runtime.openvino.convert.trace", louder)
    with pytest.raises(UnsupportedModel, match="differently from plain forwards"):
        openvino_graph(model, "float32", keep=False)


def test_a_conversion_reports_to_nobody(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = pytest.importorskip("openvino_telemetry.utils.sender")
    sent: list[str] = []

    def converts(*_: Any, **__: Any) -> Any:
        sender.TelemetrySender().send("here", "a message")  # as it does outside of continuous integration
        raise ValueError("no such graph")

    monkeypatch.setattr(sender.TelemetrySender, "send", lambda self, *given: sent.append(given))
    monkeypatch.setattr("openvino.convert_model", converts)
    with pytest.raises(UnsupportedModel, match="no such graph"):
        trace(model, probe(model))
    assert sent == []
    sender.TelemetrySender().send("here", "of somebody else")
    assert sent == [("here", "of somebody else")]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Precisions converted to; each time into the small model's graph: which one it is decides nothing here."""
    made: list[str] = []
    graph = small_llama_graphs()[1]["float32"]
    monkeypatch.setattr(conversions, "_make", lambda _, precision: made.append(precision) or graph.clone())
    return made


def test_a_conversion_is_kept_and_remade_when_damaged(model: LlamaForCausalLM, tmp_path: Path, made: list[str]) -> None:

    def graph_file(name: str) -> Path:
        return next(tmp_path.rglob(name))

    openvino_graph(model, "float32")
    openvino_graph(model, "float32")
    assert made == ["float32"]
    weights = graph_file("graph.bin")
    weights.write_bytes(weights.read_bytes()[:-8])  # cut short: the seal notices
    openvino_graph(model, "float32")
    assert made == ["float32"] * 2
    text = graph_file("graph.xml")
    text.write_bytes(b"x" * text.stat().st_size)  # as long as before, but no graph
    target = openvino_target(model, openvino_graph(model, "float32"), self_test=True)
    assert made == ["float32"] * 3 and target.vocab_size == 61


def of(folder: str, change: float = 0.0) -> LlamaForCausalLM:
    """The small model as if loaded from there; `change` is added to its weights."""
    model = small_llama()
    model.name_or_path = folder
    with torch.no_grad():
        model.model.norm.weight.add_(change)
    return model


def stored(home: Path) -> set[str]:
    return {path.parent.name for path in home.rglob("graph.xml")}


def test_a_new_conversion_replaces_the_old_one_of_the_same_model_and_no_other(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino_graph(of("one"), "float32")
    (first,) = stored(tmp_path)
    openvino_graph(of("two", 0.5), "float32")
    openvino_graph(of("", 0.75), "float32")
    others = stored(tmp_path) - {first}
    assert len(others) == 2
    openvino_graph(of("one", 0.25), "float32")
    second = stored(tmp_path) - others - {first}
    assert stored(tmp_path) == others | second and len(second) == 1
    with monkeypatch.context() as later:
        later.setattr("outrider.runtime.openvino.convert.FORMAT", 10**6)
        openvino_graph(of("one", 0.25), "float32")
    third = stored(tmp_path) - others
    assert len(third) == 1 and third != second
    openvino_graph(of("one", 0.25), "float32")  # an earlier version leaves alone what a later one made
    assert stored(tmp_path) == others | second | third and len(made) == 6
    assert not list(tmp_path.rglob("*.partial-*"))


def test_a_graph_in_use_survives_its_replacement_and_one_that_vanished_is_made_again(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = of("one")
    graph = openvino_graph(model, "float32")
    openvino_graph(of("one", 0.25), "float32")
    target = openvino_target(model, graph, self_test=True)
    assert target.vocab_size == 61
    right = conversions.kept

    def gone(folder: Path, fill: Any) -> Path:
        monkeypatch.setattr(conversions, "kept", right)
        found = right(folder, fill)
        for file in found.iterdir():  # another process has replaced it since
            file.unlink()
        return found

    monkeypatch.setattr(conversions, "kept", gone)
    monkeypatch.setattr(conversions, "_drop_replaced", lambda folder: None)
    assert openvino_target(model, openvino_graph(model, "float32"), self_test=True).vocab_size == 61
    assert len(made) == 4


def test_another_configuration_is_another_conversion(model: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    other = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "rms_norm_eps": 0.5})).eval()
    other.load_state_dict(model.state_dict())
    assert fingerprint(other) == fingerprint(model)
    assert conversions.identity_of(other) != conversions.identity_of(model)
    assert choice.find("openvino").precisions == tuple(PRECISIONS)
