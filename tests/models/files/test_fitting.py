"""A model that does not fit is refused before it is read, and a quantised file runs in the precision nearest to its."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import outrider
from outrider.core.errors import InputError
from outrider.models import convert, known
from outrider.models.known import open_model
from outrider.runtime import choice
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tiny_gguf_model(), tmp_path / "tiny.gguf", packed=True)
    return tmp_path / "tiny.gguf"


def test_weights_that_do_not_fit_are_not_packed(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "free_memory", lambda: 1000)
    with pytest.raises(InputError, match="tiny in int8 takes .* GB of memory, and 0.0 GB are to be had; use a smaller"):
        outrider.load(gguf, runtime="native", precision="int8")


def test_a_model_that_does_not_fit_is_not_read_as_a_whole(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = open_model(gguf)
    monkeypatch.setattr(convert, "free_memory", lambda: 1000)
    monkeypatch.setattr(known, "load_model", lambda *_, **__: pytest.fail("it is read"))
    with pytest.raises(InputError, match="tiny in float32 takes"):
        _ = loaded.model


def test_a_file_of_few_bits_runs_in_int8_and_says_so_once(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "WORTH_A_TRIAL", 0)
    monkeypatch.setattr(choice, "QUANTISED_BITS", 64.0)  # of so small a file most is the header
    for asked, got in ((None, "int8"), ("float32", "float32")):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "outrider"),
            outrider.load(gguf, "plain", device="cpu", precision=asked) as engine,
        ):
            assert engine.target.traits.precision == got
        assert caplog.text.count("the nearest precision") == (asked is None)
    monkeypatch.setattr(choice, "QUANTISED_BITS", 1.0)
    assert choice.nearest_precision(gguf, open_model(gguf), choice.AUTO_NAME) is None
