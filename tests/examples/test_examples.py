"""Each example runs and shows what it says; here with short texts, and as documented in the slow tests."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Example = Any  # the fixture's
Output = pytest.CaptureFixture[str]
EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows_and_how_to_run_it(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    assert re.search(rf"^(Run: python examples/{path.name}|Use: pip install \./examples/)", said, re.MULTILINE)
    assert len(source.splitlines()) <= 70
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"({path.relative_to(EXAMPLES)})" in readme


def test_a_chat_goes_on_with_what_was_said(example: Example, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    lines = iter(["My name is Ada.", "What is my name?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    messages = example("chat").messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    shown = capsys.readouterr().out
    assert all(message["content"] in shown for message in messages if message["role"] == "assistant")
    assert shown.count("tokens a step]") == 2


def test_an_edit_with_a_prediction_takes_fewer_passes_for_the_same_text(example: Example, capsys: Output) -> None:
    module = example("edit_code")
    module.main()
    shown = capsys.readouterr().out
    assert "the same text as plain decoding: True" in shown and shown.startswith("class ")
    fast, plain = map(int, re.findall(r"(\d+) with(?:out)?", shown))
    assert fast < plain / 2


def test_a_file_of_prompts_is_answered_line_by_line(example: Example, tmp_path: Path, capsys: Output) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("Name a river.\n\nSay hello.\n", encoding="utf-8")
    example("batch_over_a_file").main(str(prompts), str(answers))
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == ["Name a river.", "Say hello."] and all(row["answer"] for row in rows)
    assert capsys.readouterr().err.startswith("2 answers, ")


def test_the_best_of_n_has_the_largest_reward(example: Example, capsys: Output) -> None:
    module = example("best_of_n")
    module.main(["rain", "cat"])
    lines = capsys.readouterr().out.splitlines()
    ranked = [(float(line.split()[0]), ast.literal_eval(line[8:])) for line in lines[: module.SAMPLES]]
    assert ranked == sorted(ranked, key=lambda pair: -pair[0]) and ranked[0][1] in "\n".join(lines[module.SAMPLES :])
    assert len({text for _, text in ranked}) > 1
    assert module.reward("A cat.", ["rain", "cat"]) > module.reward("A cat and a dog.", ["rain", "cat"])
    assert module.reward("brains of a cat", ["rain", "cat"]) < module.reward("A cat in the rain", ["rain", "cat"])


def test_transformers_says_the_same_with_outrider(
    example: Example, smollm2: Any, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    module, kind = example("faster_transformers"), type(smollm2.model)
    generate = kind.generate

    def short(*given: Any, max_new_tokens: int, **more: Any) -> Any:
        return generate(*given, max_new_tokens=min(max_new_tokens, example.max_new_tokens), **more)

    monkeypatch.setattr(module, "AutoModelForCausalLM", Given(smollm2.model))
    monkeypatch.setattr(kind, "generate", short)
    module.main()
    shown = capsys.readouterr().out
    assert "the same tokens: True" in shown and "transformers alone" in shown and "with outrider" in shown


class Given:
    """In place of a class that would read the model once more."""

    def __init__(self, model: object) -> None:
        self.model = model

    def from_pretrained(self, name: str) -> object:
        return self.model


def test_facts_come_as_json_of_the_schema(example: Example, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    module = example("json_from_text")
    monkeypatch.setattr(sys, "argv", ["json_from_text.py"])
    example.max_new_tokens = 128
    module.main()
    found = capsys.readouterr()
    assert set(json.loads(found.out)) == set(module.SCHEMA["required"]) and "of them drafted" in found.err


def test_the_cells_of_the_notebook_run_and_draw_a_tree(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plots, "show", lambda: None)
    cells = json.loads((EXAMPLES / "tree_of_a_step.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in codes)
    names: dict[str, object] = {}
    for cell in codes:
        exec(compile("".join(cell["source"]), "tree_of_a_step.ipynb", "exec"), names)
    figure, tree = names["figure"], names["tree"]
    assert len(figure.axes[0].texts) == len(tree["tokens"]) > 2 and len(figure.axes[0].lines) == len(tree["tokens"]) - 1
    assert len(set(names["lines"].values())) >= len(names["leaves"](tree))
    plots.close(figure)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat", "tokens a step]"),
        ("edit_code", "the same text as plain decoding: True"),
        ("batch_over_a_file", '"ended by"'),
        ("best_of_n", "sample "),
        ("json_from_text", '"hobbies"'),
        ("faster_transformers", "the same tokens: True"),
        ("train_a_drafter", "the same text as plain decoding: True"),
    ],
)
def test_an_example_runs_as_its_first_lines_say(name: str, said: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], input="Hello\n\n", capture_output=True, text=True,
        cwd=EXAMPLES.parent, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout
