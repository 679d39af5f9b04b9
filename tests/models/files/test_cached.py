"""What lies in the cache is shown and cleared: by model, by kind, by name; and what a start took is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.core.errors import UnknownName
from outrider.models import doctor
from outrider.models.files import cached
from outrider.models.files.phases import phase, recorded
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_gguf(tiny_gguf_model(), folder / "tiny.gguf", packed=True)
        with outrider.load(folder / "tiny.gguf", runtime="native", precision="int8") as engine:
            yield folder, engine


def test_packed_weights_are_listed_with_their_model_and_size(filled: Any) -> None:
    kinds = {entry.kind: entry for entry in cached.entries()}
    assert kinds["native"].model == kinds["known"].model == "tiny"
    weights = kinds["native"].path / "weights.bin"
    assert kinds["native"].bytes >= weights.stat().st_size
    assert dict(cached.remembered())["tiny"].endswith("packed and checked for native in int8")


def test_a_name_that_is_nowhere_is_refused_with_those_there_are(filled: Any) -> None:
    with pytest.raises(UnknownName, match="nothing in the cache is called 'tini'; did you mean tiny"):
        cached.chosen(["tini"])


def test_what_is_cleared_is_gone_and_the_rest_is_not(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, engine = filled
    freed = cached.clear(cached.chosen(["native"]))
    assert freed > 10_000
    assert {entry.kind for entry in cached.entries()} & {"native", "known"} == {"known"}
    assert engine.generate([[3, 4]], max_new_tokens=2)[0].token_ids  # goes on with what it has open
    with outrider.load(folder / "tiny.gguf", runtime="native", precision="int8", method="plain"):
        assert "native" in {entry.kind for entry in cached.entries()}


def test_a_start_tells_its_phases_and_its_memory(filled: Any) -> None:
    _, engine = filled
    assert {"read", "pack", "check", "map", "drafters"} <= engine.phases.keys()
    assert 0 < engine.footprint()["weights"] < engine.footprint()["process at most"]


def test_a_phase_within_another_counts_for_itself() -> None:
    with recorded() as seconds:
        with phase("outer"), phase("inner"):
            sum(range(200_000))
        with phase("outer"):
            pass
    assert seconds["inner"] > seconds["outer"] >= 0
    with phase("nobody asked"):
        pass
    assert "nobody asked" not in seconds


def test_the_doctor_says_what_is_remembered_and_where_this_is(filled: Any) -> None:
    findings = {finding.name: finding.value for finding in doctor.report(timeout=0.1)}
    assert "tiny" in " ".join(findings) and "native" in findings["machine"]
    assert Path(findings["cache"]).name == "models"
