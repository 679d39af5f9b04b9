"""`outrider suggest` on a tiny model of bytes: as many suggestions as asked, marked as lossy; bad input is one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conditional.test_conditional import model, run

__all__ = ["model", "run"]  # fixtures


def suggested(run: Any, *more: str) -> dict[str, Any]:
    result = run("suggest", "the cat sat on", "--json", *more)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("count", [1, 5])
def test_suggestions_are_as_many_and_as_long_as_asked_and_marked_as_lossy(run: Any, count: int) -> None:
    found = suggested(run, "-k", str(count), "--length", "4")
    assert found["lossless"] is False and len(found["suggestions"]) == count
    assert len({tuple(one["tokens"]) for one in found["suggestions"]}) == count
    assert all(1 <= len(one["tokens"]) <= 4 for one in found["suggestions"])
    assert all(one["ended"] or len(one["tokens"]) == 4 for one in found["suggestions"])
    assert sum(one["share"] for one in found["suggestions"]) == pytest.approx(1)


def test_people_are_shown_a_line_each(run: Any) -> None:
    result = run("suggest", "the cat sat on", "-k", "3", "--length", "3")
    lines = result.stdout.strip().splitlines()
    assert result.exit_code == 0 and "lossy" in lines[-1] and len(lines) >= 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [(["  "], "empty"), (["x", "-k", "0"], "at least 1"), (["x", "--alpha", "2"], "0 to 1"),
     (["x", "--store", "nowhere"], "nowhere")],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(run: Any, asked: list[str], said: str) -> None:
    result = run("suggest", *asked)
    assert result.exit_code == 2 and said in result.stderr
