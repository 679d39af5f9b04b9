"""A quantised GGUF file that runs in float32: one line says how it would be faster, where that is so."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outrider
from outrider.core.records import Traits
from outrider.runtime import choice
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf

HINT = "with --precision int8"


def said(caplog: pytest.LogCaptureFixture, source: Any, runtime: str, precision: str, bits: float) -> bool:
    weights = torch.zeros(1000)
    if isinstance(source, Path):
        source.write_bytes(bytes(int(1000 * bits / 8)))
    caplog.clear()
    target: Any = SimpleNamespace(traits=Traits(runtime, precision))
    with caplog.at_level(logging.WARNING, "outrider"):
        choice.advise(source, target, SimpleNamespace(origin=None, model=SimpleNamespace(parameters=lambda: [weights])))
    return HINT in caplog.text


def test_the_hint_comes_for_few_bits_in_float32_where_the_runtime_has_int8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.gguf"
    assert said(caplog, file, "native", "float32", 4.8) and "model.gguf has 4.8 bits a weight" in caplog.text
    assert said(caplog, file, "openvino", "float32", 8.5)
    assert not said(caplog, file, "native", "int8", 4.8)
    assert not said(caplog, file, "native", "float32", 16.1)
    assert not said(caplog, file, "eager", "", 4.8)
    assert not said(caplog, "smollm2", "native", "float32", 4.8)


def test_loading_such_a_file_says_it_once_and_not_to_those_who_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.models.convert.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(choice, "QUANTISED_BITS", 64.0)  # of so small a file most is the header
    write_gguf(tiny_gguf_model(), tmp_path / "tiny.gguf", packed=True)
    for precision, count in ((None, 1), ("float32", 0)):
        caplog.clear()
        outrider.load(
            tmp_path / "tiny.gguf", "plain", device="cpu", runtime="native", precision=precision, max_slots=1
        ).close()
        assert caplog.text.count(HINT) == count
