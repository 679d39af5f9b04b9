"""The report says what is there, what is not, and what that means."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from outrider.models import doctor, embedded, hub
from outrider.models.doctor import State, report


def finding(name: str) -> doctor.Finding:
    return next(f for f in report() if f.name == name)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "reachable", lambda timeout=3.0: False)


def test_names_versions_and_the_device() -> None:
    found = {f.name: f for f in report()}
    assert torch.__version__ in found["torch"].value
    assert "because" in found["device"].value
    assert found["hub"].state == State.NOTE
    assert "embedded model" in found["hub"].remedy


def test_a_missing_extra_says_what_it_would_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "gguf":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    assert finding("gguf").state == State.NOTE
    assert "outrider[demo]" in finding("gguf").remedy
    assert finding("matplotlib").state == State.OK


def test_the_embedded_model_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "cache_folder", lambda: tmp_path)
    assert "not cached" in finding("model smollm2").value
    monkeypatch.setattr(embedded, "is_complete", lambda folder: folder.parent == tmp_path)
    assert finding("model smollm2").state == State.OK
