"""`outrider check`: exit statuses, JSON, and one-line errors before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.check import gate
from outrider.cli import app
from outrider.models import LoadedModel

TINY = gate.Size(2, 12, 8, 5, 8, 4, 12, 1, thorough=False)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["check", *args])


@pytest.fixture
def folder(small_enumeration: None, tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gate, "QUICK", TINY)
    tiny_llama.model.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_verdict_is_the_status_and_the_json_the_evidence(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run("--method", "draft-model", "-o", "layers=1", "--model", folder, "--quick", "--json", str(file))
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["verdict"] == "same output"
    assert [part["name"] for part in report["parts"]] == list(gate.PARTS)
    assert "verdict: same output" in done.stdout and "martingale" in done.stdout
    assert "in float32 by eager" in done.stdout and "drawn from a draft at" in " ".join(done.stdout.split())


def test_json_alone_is_all_of_standard_output(folder: str) -> None:
    done = run("--method", "plain", "--model", folder, "--quick", "--plant-bug", "stale-cache", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["bugs"][0]["caught_by"] == ["greedy", "seeded"]


def test_plant_bug_alone_means_all(folder: str) -> None:
    done = run("--model", folder, "--plant-bug", "--quick", "--method", "plain", "--json")
    outcomes = {bug["name"]: bug["outcome"] for bug in json.loads(done.stdout)["bugs"]}
    assert done.exit_code == 0 and len(outcomes) == 6 and outcomes["wrong-residual"] == "cannot show"


@pytest.mark.parametrize(
    "args, said",
    [
        (["--method", "nonesuch"], "known methods"),
        (["--plant-bug", "gremlin"], "leaked-sibling"),
        (["--option", "budget"], "name=value"),
        (["--prompts", "nowhere.jsonl"], "no such file"),
        (["--json", "nowhere/out.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_status_2(args: list[str], said: str) -> None:
    done = run(*args)
    assert done.exit_code == 2 and said in done.stderr
    assert "Traceback" not in done.output and len(done.stderr.strip().splitlines()) == 1
