"""`outrider batch`: results in the order of the prompts, one line each, and nothing lost after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.check.toy import ToyTarget
from outrider.core.params import SamplingParams
from tests.core.schedule.toys import LM, engine, letters, lookup


class Loaded:
    """What the command asks of a loaded model, over a toy; a prompt's characters are its tokens."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.engine, self.target = engine(ToyTarget(LM, slots=2)), SimpleNamespace(traits=SimpleNamespace(slots=2))
        self.asked: list[Any] = []
        self.fails_after = fails_after

    def submit(self, prompt: Any, params: SamplingParams, **extra: Any) -> Any:
        self.asked.append(prompt)
        text = prompt if isinstance(prompt, str) else "".join(m["role"][0] + m["content"] for m in prompt)
        return self.engine.submit([ord(c) % 5 for c in text if c != "!"], params, lookup())

    def step(self) -> bool:
        if self.fails_after is not None and self.engine.steps >= self.fails_after:
            raise KeyboardInterrupt
        return self.engine.step()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": "abcd" * (i + 1), "max_new_tokens": 3 + 5 * (i % 3), "id": f"p{i}"} for i in range(9)]
    rows.append({"turns": ["one", "two"], "id": "turns"})
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_results_stand_in_the_order_of_the_prompts(run: Any, prompts: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("outrider.load", lambda *args, **more: Loaded())
    out = prompts.with_name("out.jsonl")
    result = run("batch", str(prompts), str(out), "--json")
    assert result.exit_code == 0, result.stderr
    made = lines(out)
    assert [line["id"] for line in made] == [*(f"p{i}" for i in range(9)), "turns"]
    assert [line["tokens"] for line in made[:9]] == [3, 8, 13] * 3 and len(made[9]["turns"]) == 2
    loaded = Loaded()
    for row, line in zip(lines(prompts)[:9], made, strict=False):
        alone = loaded.submit([{"role": "user", "content": row["prompt"]}], SamplingParams())
        assert letters(alone.result().token_ids).startswith(line["text"])
    summary = json.loads(result.stdout)
    assert (summary["lines"], summary["failed"]) == (10, 0) and summary["steps"] > 0
    assert not prompts.with_name("out.jsonl.journal").exists()


def test_an_interrupted_run_goes_on_and_asks_nothing_twice(run: Any, prompts: Path, monkeypatch: Any) -> None:
    out, made = prompts.with_name("out.jsonl"), [Loaded(fails_after=12), Loaded()]
    waiting = iter(made)
    monkeypatch.setattr("outrider.load", lambda *args, **more: next(waiting))
    first = run("batch", str(prompts), str(out), "--seed", "5", "-t", "1")
    assert first.exit_code == 130 and "go on with: outrider batch" in first.stderr and not out.exists()
    assert run("batch", str(prompts), str(out), "--seed", "5", "-t", "1").exit_code == 0
    known = Loaded()
    monkeypatch.setattr("outrider.load", lambda *args, **more: known)
    assert run("batch", str(prompts), str(out.with_name("whole.jsonl")), "--seed", "5", "-t", "1").exit_code == 0
    assert lines(out) == lines(out.with_name("whole.jsonl"))
    assert len(made[1].asked) < len(known.asked)


def test_a_journal_of_other_prompts_is_refused(run: Any, prompts: Path, monkeypatch: Any) -> None:
    out, made = prompts.with_name("out.jsonl"), iter([Loaded(fails_after=5), Loaded()])
    monkeypatch.setattr("outrider.load", lambda *args, **more: next(made))
    assert run("batch", str(prompts), str(out)).exit_code == 130
    prompts.write_text('{"prompt": "other"}\n')
    result = run("batch", str(prompts), str(out))
    assert result.exit_code == 2 and "prompts" in result.stderr


def test_a_prompt_that_fails_has_its_error_in_its_line(run: Any, prompts: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("outrider.load", lambda *args, **more: Loaded())
    out = prompts.with_name("out.jsonl")
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "!"}\n{"prompt": "c"}\n')
    result = run("batch", str(prompts), str(out), "--raw")
    assert result.exit_code == 2 and "1 of 3 prompts failed" in result.stderr
    assert ["error" in line for line in lines(out)] == [False, True, False] and "empty" in lines(out)[1]["error"]


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"prompt": "a", "temperature": -1}', "line 1: temperature"), ("{}", "line 1 needs exactly one"),
     ('{"turns": ["a", "b"], "n": 2}', "one by one")],
)  # fmt: skip
def test_a_bad_line_is_named_before_a_model_is_loaded(run: Any, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(line + "\n")
    result = run("batch", str(path), str(tmp_path / "out.jsonl"))
    assert result.exit_code == 2 and words in result.stderr


def test_a_file_of_results_is_not_overwritten_unless_asked(run: Any, prompts: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("outrider.load", lambda *args, **more: Loaded())
    out = prompts.with_name("out.jsonl")
    out.write_text("mine\n")
    assert "add --force" in run("batch", str(prompts), str(out)).stderr and out.read_text() == "mine\n"
    assert run("batch", str(prompts), str(out), "--force").exit_code == 0 and len(lines(out)) == 10


@pytest.mark.slow
def test_after_a_kill_the_same_command_goes_on(prompts: Path) -> None:
    rows = [{"prompt": f"Name {i} kinds of trees.", "max_new_tokens": 24} for i in range(2, 14)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, folder = prompts.with_name("out.jsonl"), prompts.with_name("out.jsonl.journal")
    command = [sys.executable, "-m", "outrider", "batch", str(prompts), str(out), "--slots", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 100
    while time.monotonic() < limit and process.poll() is None:
        if folder.exists() and sum(1 for _ in (folder / "journal.jsonl").open()) > 5:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    written = lines(folder / "journal.jsonl")
    kept = {line["line"]: line["result"] for line in written if line["kind"] == "result"}
    assert 2 < len(kept) < 12
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=100).returncode == 0
    made = lines(out)
    assert len(made) == 12 and all(made[i - 1] == result for i, result in kept.items())
