"""`methods`, `doctor` and `demo`: a table for people, the same as JSON."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from outrider.cli.output import FittingConsole
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


@pytest.mark.parametrize("width", [30, 40, 100])
def test_a_table_loses_nothing_where_the_terminal_is_narrow(width: int) -> None:
    table = Table("method", "what it does", "file", title="[bold]methods[/]")
    table.add_row("prompt-lookup", "copies what [bold]followed[/] an earlier occurrence", "draft/lookup/lookup.py")
    table.add_row("plain", "", "a-name-that-is-longer-than-any-terminal-of-forty-columns")
    shown = StringIO()
    FittingConsole(file=shown, width=width).print(table)
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert max(map(len, lines)) <= width and "…" not in shown.getvalue()
    assert ("method: prompt-lookup" in lines) == (width < 100)
    if width < 100:
        together = "".join("".join(lines).split())
        assert "copieswhatfollowedanearlieroccurrence" in together and "file:draft/lookup/lookup.py" in together
        assert together.endswith("file:a-name-that-is-longer-than-any-terminal-of-forty-columns")
    else:
        assert sum(line.count("-") for line in lines) == 11  # of the names, wherever they are folded


def test_a_table_that_fits_stays_a_table() -> None:
    table = Table("a", "b")
    table.add_row("1", "2")
    fitted, plain = StringIO(), StringIO()
    FittingConsole(file=fitted, width=40).print(table)
    Console(file=plain, width=40).print(table)
    assert fitted.getvalue() == plain.getvalue()
