"""`--style`: the prior goes with every request, and standard error says that the model's distribution is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.constrain.style import STRENGTH, Style


@pytest.fixture
def styled(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pretended engine with a style of its own, whatever the file."""
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("a style")
    engine.style = lambda path, strength=STRENGTH: Style.from_tokens([[1, 2, 3]], 8, strength)
    return engine


def test_the_prior_is_submitted_and_announced(run: Any, styled: Any, text: str) -> None:
    result = run("generate", "Hello", "--style", "some.txt", "--style-strength", "0.2")
    assert (result.exit_code, result.stdout) == (0, text + "\n")
    assert "distribution is changed" in result.stderr
    assert styled.requests[0][2]["constraint"].strength == 0.2


def test_the_json_names_the_style_and_what_it_does(run: Any, styled: Any) -> None:
    payload = json.loads(run("generate", "Hello", "--style", "some.txt", "--json").stdout)
    assert payload["style"] == {"file": "some.txt", "strength": STRENGTH, "changes_distribution": True}
    assert json.loads(run("generate", "Hello", "--json").stdout)["style"] is None


def test_every_answer_of_a_chat_has_the_prior(run: Any, styled: Any) -> None:
    result = run("chat", "--style", "some.txt", input="one\ntwo\n")
    assert result.exit_code == 0 and "distribution is changed" in result.stderr
    assert [extra["constraint"].strength for _, _, extra in styled.requests] == [STRENGTH] * 2


def test_without_a_style_nothing_is_announced(run: Any, styled: Any) -> None:
    result = run("generate", "Hello")
    assert "changed" not in result.stderr and "constraint" not in styled.requests[0][2]


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)])
@pytest.mark.parametrize(
    "more",
    [("--style-strength", "0.2"), ("--style", "none.txt"), ("--style", "some.txt", "--style-strength", "-1")],
    ids=["a strength without a style", "no such file", "a negative strength"],
)
def test_a_style_that_cannot_be_is_refused_before_a_model_is_loaded(run: Any, styled: Any, command, more) -> None:
    result = run(*command, *more)
    assert result.exit_code == 2 and "--style" in result.output
    assert not styled.loaded
