"""Files that commands write: a result of ours is replaced, anything else only with --force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider._version import __version__
from outrider.bench.report import page
from outrider.cli import output, shell
from outrider.cli.output import check_folder, check_html
from outrider.cli.shell import force_first
from outrider.core.errors import InputError


@pytest.fixture(autouse=True)
def not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the last command line said."""
    monkeypatch.setattr(shell, "_forced", False)


@pytest.mark.parametrize("content", ["not to be lost", '{\n  "name": "a package"\n}\n', "[]", "\xff\x00"])
def test_a_foreign_file_is_refused_before_the_work_and_replaced_with_force(
    run: Any, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "out.json"
    path.write_text(content, encoding="latin-1")
    before = path.read_bytes()
    refused = run("methods", "--json", str(path))
    assert refused.exit_code == 2 and "add --force" in refused.stderr and refused.stdout == ""
    assert path.read_bytes() == before
    assert run("methods", "--json", str(path), "--force").exit_code == 0
    assert json.loads(path.read_text())["outrider"] == __version__


def test_results_of_ours_and_empty_files_are_replaced(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.touch()
    for command in ("methods", "doctor", "methods"):
        assert run(command, "--json", str(path)).exit_code == 0
    assert run("--force", "methods", "--json", str(path)).exit_code == 0


def test_what_is_no_plain_file_is_never_replaced(run: Any, tmp_path: Path) -> None:
    refused = run("methods", "--json", "/dev/null", "--force")
    assert refused.exit_code == 2 and "a device" in refused.stderr and not Path("/dev/null").is_file()


def test_a_page_is_replaced_only_by_its_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.plots.check_matplotlib", lambda: None)
    ours, foreign = tmp_path / "ours.html", tmp_path / "foreign.html"
    ours.write_text(page("a test", [], {"machine": {}, "settings": {}}))
    foreign.write_text("<!doctype html><html><head><title>My diary</title>")
    assert check_html(str(ours)) == ours
    with pytest.raises(InputError, match="foreign.html: exists and is no result"):
        check_html(str(foreign))
    monkeypatch.setattr(output, "forced", lambda: True)
    assert check_html(str(foreign)) == foreign


def test_files_in_a_folder_of_ours_are_replaced_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(tmp_path / "new", ("*",), ())
    check_folder(tmp_path, ("*",), ())
    (tmp_path / "model.safetensors").touch()
    check_folder(tmp_path, ("report.md",), ())
    with pytest.raises(InputError, match="holds model.safetensors, not of such a run"):
        check_folder(tmp_path, ("model.safetensors",), ("drafter.json",))
    with pytest.raises(InputError, match="is a file"):
        check_folder(tmp_path / "model.safetensors", ("*",), ())
    (tmp_path / "drafter.json").touch()
    check_folder(tmp_path, ("model.safetensors",), ("drafter.json",))
    monkeypatch.setattr(output, "forced", lambda: True)
    check_folder(tmp_path, ("*",), ())


@pytest.mark.parametrize(
    "command",
    [
        ("train", "run", "--data", "text"),
        ("train", "distill"),
        ("train", "trim", "--drafter", "d", "--data", "text"),
        ("bench", "inflate"),
        ("bench", "run"),
    ],
)
def test_a_command_leaves_a_model_in_its_out_folder_alone(run: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    for name in ("model.safetensors", "report.md"):
        (tmp_path / name).write_text("not to be lost")
    refused = run(*command, "--out", str(tmp_path), "--model", "/no/such/model")
    assert refused.exit_code == 2 and "add --force to overwrite" in refused.stderr
    forced = run(*command, "--out", str(tmp_path), "--model", "/no/such/model", "--force")
    assert forced.exit_code == 2 and "--force" not in forced.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["a", "--json=x", "--force"], ["--force", "a", "--json=x"]),
        (["--force", "a"], ["--force", "a"]),
        (["a", "--", "--force"], ["a", "--", "--force"]),
        (["a"], ["a"]),
    ],
)
def test_force_may_stand_anywhere(given: list[str], meant: list[str]) -> None:
    assert force_first(given) == meant
