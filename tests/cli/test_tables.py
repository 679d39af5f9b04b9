"""`methods`, `doctor` and `demo`: a table for people, the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.models.doctor import Finding, State


def both_forms(run: Any, command: str, tmp_path: Path) -> tuple[str, Any]:
    """The terminal's form and the JSON, which must be the same on standard output and in a file."""
    target = tmp_path / "out.json"
    shown = run(command, "--json", str(target))
    piped = run(command, "--json")
    assert shown.exit_code == piped.exit_code == 0 and piped.stderr == ""
    assert json.loads(piped.stdout) == json.loads(target.read_text())
    return shown.stdout, json.loads(piped.stdout)


def test_methods(run: Any, tmp_path: Path) -> None:
    table, payload = both_forms(run, "methods", tmp_path)
    rows = payload["rows"]
    assert {"plain", "prompt-lookup", "draft-model"} <= {row["name"] for row in rows}
    for row in rows:
        assert {"name", "paper", "family", "lossless", "needs"} <= set(row)
        assert row["name"] in table and isinstance(row["lossless"], bool)
    assert "max_ngram" in run("methods", "--options").stdout


def test_doctor(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("cache", State.PROBLEM, "[/nowhere] cannot be written", "set it"), Finding("x", State.OK, "1")]
    monkeypatch.setattr("outrider.models.doctor.report", lambda: findings)
    table, payload = both_forms(run, "doctor", tmp_path)
    assert payload["rows"][0] == {
        "name": "cache",
        "state": "problem",
        "value": "[/nowhere] cannot be written",
        "remedy": "set it",
    }
    assert "[/nowhere] cannot be written" in table


def test_demo_compares_plain_with_the_method_on_two_prompts(run: Any, engine: Any, text: str, tmp_path: Path) -> None:
    table, payload = both_forms(run, "demo", tmp_path)
    assert [row["method"] for row in payload["rows"]] == ["plain", "mix"] * 2
    assert all(row["identical"] and row["text"] == text and row["speedup"] == 1.0 for row in payload["rows"])
    assert "speed-up" in table and "outrider chat" in table and table.count("The rain fälls") == 4


def test_demo_shows_when_the_texts_differ(run: Any, engine: Any) -> None:
    engine.cancel_at = 4  # two warm-ups, then plain, then the method of the first prompt
    result = run("demo", "--json")
    assert result.exit_code == 130
    assert [row["identical"] for row in json.loads(result.stdout)["rows"]] == [True, False]
