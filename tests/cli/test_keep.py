"""`outrider prepare` and `outrider cache`, help and completion: what is said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_prepare_says_what_the_start_took_and_which_model_was_meant(run: Any, engine: Any) -> None:
    result = run("prepare", "other.gguf", "--precision", "int8", "--json")
    assert result.exit_code == 0, result.stderr
    assert engine.loaded["model"] == "other.gguf" and engine.loaded["precision"] == "int8" and engine.prepared
    assert json.loads(result.stdout)["seconds"] == {"read": 0.25, "map": 0.001}
    assert "start: read 0.25 s\nmemory: weights 135 MB" in run("prepare").stdout


def test_the_statistics_tell_the_start_once(run: Any, engine: Any) -> None:
    result = run("generate", "Hello", "--stats", "--samples", "2", "--no-stream")
    assert result.stderr.count("read 0.25 s") == 1


def test_the_cache_is_shown_and_cleared_by_name(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "outrider" / "native" / "abc-int8"
    place.mkdir(parents=True)
    (place / "held.json").write_text(json.dumps({"about": {"model": "tiny"}}))
    (place / "weights.bin").write_bytes(b"x" * 5_000_000)
    rows = json.loads(run("cache", "list", "--json").stdout)["rows"]
    assert [(row["kind"], row["model"], row["bytes"] > 5_000_000) for row in rows] == [("native", "tiny", True)]
    assert "tiny" in run("cache", "list").stdout
    assert run("cache", "clear").exit_code == 2 and place.exists()
    assert "there are: native, tiny" in run("cache", "clear", "other").stderr
    assert "5 MB are free again" in run("cache", "clear", "tiny").stdout and not place.exists()
    assert "the cache is empty" in run("cache", "list").stdout


def test_commands_stand_in_groups(run: Any) -> None:
    said = run("--help").stdout
    places = [said.index(group) for group in ("Use a model", "Measure and prove", "This machine", "Train, index")]
    assert places == sorted(places) and "--install-completion" in said


def test_no_colour_is_written_where_none_is_wanted(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = run("cache", "list").stdout + run("--help").stdout
    assert "\x1b[3" not in said
