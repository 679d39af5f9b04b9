"""`outrider explain`: a page of two runs, and what is said where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_the_page_holds_both_runs_of_one_seed(run: Any, engine: Any, text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("explain", "Hello", "-o", str(page))
    assert (result.exit_code, result.stdout) == (0, text + "\n") and str(page) in result.stderr.replace("\n", "")
    assert text.split()[0] in page.read_text() and "<title>Outrider: " in page.read_text()
    params = [params for _, params, _ in engine.requests]
    assert len(params) == 2 and all(one.trace for one in params) and params[0].seed == params[1].seed is not None
    assert [prompt for prompt, _, _ in engine.requests] == [[{"role": "user", "content": "Hello"}]] * 2


def test_plain_can_be_left_out_and_the_document_had_as_json(run: Any, engine: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("explain", "Hello", "--no-plain", "--raw", "--method", "suffix", "-o", str(page), "--json")
    payload = json.loads(result.stdout)
    assert payload["method"] == "suffix" and payload["plain"] is None and payload["prompt"] == "Hello"
    assert [prompt for prompt, _, _ in engine.requests] == ["Hello"]


def test_a_page_of_ours_is_replaced_and_another_file_is_not(run: Any, engine: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for _ in range(2):
        assert run("explain", "Hello", "-o", str(page)).exit_code == 0
    page.write_text("a letter")
    result = run("explain", "Hello", "-o", str(page))
    assert result.exit_code == 2 and "--force" in result.stderr and page.read_text() == "a letter"
    assert len(engine.requests) == 4  # refused before any work


@pytest.mark.parametrize(
    ("args", "said"),
    [(["  "], "the prompt is empty"), (["Hello", "--samples", "2"], "--samples 2"),
     (["Hello", "-o", "/no/such/folder/page.html"], "create it first")],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_in_a_line(run: Any, engine: Any, args: list[str], said: str) -> None:
    result = run("explain", *args)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split()) and engine.requests == []


def test_an_interrupted_run_still_has_its_page(run: Any, engine: Any, tmp_path: Path) -> None:
    engine.cancel_at = 1
    page = tmp_path / "page.html"
    assert run("explain", "Hello", "--no-plain", "-o", str(page)).exit_code == 0
    assert '"finish_reason":"cancelled"' in page.read_text()
