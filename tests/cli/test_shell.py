"""The command as a process: quick to answer, clean when interrupted or when its reader leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.shell import fill_optional

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
SLOW_ENGINE = """
import runpy, sys, outrider
engine = runpy.run_path({fake!r})["FakeEngine"](pause=0.2)
outrider.load = engine.load
sys.argv = ["outrider", *{args!r}]
from outrider.cli import main
main()
"""


def start(code: list[str], **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        env=ENVIRONMENT, **more,
    )  # fmt: skip


def slow(*args: str) -> list[str]:
    return ["-c", SLOW_ENGINE.format(fake=str(Path(__file__).with_name("conftest.py")), args=list(args))]


def interrupt_after_first_text(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    assert process.stdout is not None
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    return process.returncode, first + rest, errors


@pytest.mark.parametrize(
    ("args", "filled"),
    [
        ("--json", ["--json=-"]),
        ("a --json --raw", ["a", "--json=-", "--raw"]),
        ("a --json out.json", ["a", "--json", "out.json"]),
        ("a --json - b", ["a", "--json", "-", "b"]),
        ("a --json=x", ["a", "--json=x"]),
        ("-- --json", ["--", "--json"]),
    ],
)
def test_json_without_a_value_means_standard_output(args: str, filled: list[str]) -> None:
    assert fill_optional(args.split()) == filled


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("generate hi --bogus", "error: no such option: --bogus; see outrider generate --help"),
        ("--bogus", "error: no such option: --bogus; see outrider --help"),
        ("generat hi", "error: no such command 'generat'; did you mean 'generate'; see outrider --help"),
        ("batch in.jsonl", "error: missing argument 'OUT.jsonl'; see outrider batch --help"),
        ("index build", "error: missing option '--corpus'; see outrider index build --help"),
        ("generate hi -n", "error: option '-n' requires an argument; see outrider --help"),
        ("generate hi -n x", "error: invalid value for '--max-new-tokens' / '-n': "),
    ],
)
def test_what_the_parser_refuses_is_one_line_that_says_where_to_look(run: Any, args: str, said: str) -> None:
    result = run(*args.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(said)


def test_a_group_without_a_command_shows_its_help(run: Any) -> None:
    assert "Usage:" in run("train").output and "error" not in run("train").output


@pytest.mark.parametrize("columns", [40, 75, 76, 100])
@pytest.mark.parametrize("command", ["", "generate", "train run"])
def test_help_fits_the_terminal_and_cuts_no_name_off(command: str, columns: int) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "outrider", *command.split(), "--help"], capture_output=True, text=True, check=True,
        encoding="utf-8", env={**ENVIRONMENT, "COLUMNS": str(columns)},
    ).stdout  # fmt: skip
    assert max(map(len, shown.splitlines())) <= columns and "…" not in shown
    assert {"": "--install-completion", "generate": "--repetition-penalty", "train run": "--intermediate"}[
        command
    ] in shown


def test_help_and_version_import_no_heavy_library() -> None:
    code = "import sys; import outrider.cli; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    done = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("outrider ")


def test_ctrl_c_gives_the_partial_text_and_valid_json(tmp_path: Path, text: str) -> None:
    target = tmp_path / "out.json"
    status, out, errors = interrupt_after_first_text(start(slow("generate", "Hello", "--json", str(target))))
    generation = json.loads(target.read_text())["generations"][0]
    assert status == 130 and "Traceback" not in errors
    assert generation["finish_reason"] == "cancelled"
    assert (
        out == generation["text"] + "\n" and text.startswith(generation["text"]) and len(generation["text"]) < len(text)
    )


def test_ctrl_c_in_a_chat_stops_the_answer_and_goes_on(text: str) -> None:
    process = start(slow("chat"), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("Hello\nMore\n")
    process.stdin.flush()
    status, out, errors = interrupt_after_first_text(process)
    assert status == 0 and "Traceback" not in errors and errors.count("stopped") == 1
    first, second = out.split("\n", 1)
    assert text.startswith(first) and len(first) < len(text) and second == text + "\n"


def test_ctrl_c_while_loading_is_one_word() -> None:
    code = "import outrider, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # may be ignored
    code += "def load(*a, **k): signal.raise_signal(signal.SIGINT)\noutrider.load = load\n"
    code += "import sys; sys.argv = ['outrider', 'generate', 'Hello']\nfrom outrider.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_reader_that_leaves_causes_no_noise() -> None:
    process = start(slow("generate", "Hello"))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 1 and errors == ""
    process.stderr.close()


@pytest.mark.slow
def test_the_embedded_model_answers_and_is_the_same_with_and_without_speculation(smollm2: Any) -> None:
    texts = []
    for method in ("plain", "prompt-lookup"):
        command = [
            sys.executable,
            "-m",
            "outrider",
            "generate",
            "Count: one two one two",
            "--runtime",
            "eager",
            "--method",
            method,
            "-n",
            "12",
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert (done.returncode, done.stderr) == (0, "")
        texts.append(json.loads(done.stdout)["generations"][0]["text"])
    assert texts[0] == texts[1] != ""


def test_ctrl_c_on_the_embedded_model(smollm2: Any, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    args = [
        "-m",
        "outrider",
        "generate",
        "--runtime",
        "eager",
        "--method",
        "prompt-lookup",
        "Tell a very long story.",
        "-n",
        "4000",
        "--ignore-eos",
        "--json",
        str(target),
    ]
    status, out, errors = interrupt_after_first_text(start(args))
    generation = json.loads(target.read_text())["generations"][0]
    assert status == 130 and errors == ""
    assert generation["finish_reason"] == "cancelled" and out == generation["text"] + "\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((" ",), "the prompt is empty"),
        (("word " * 9000,), "tokens but the context holds"),
        (("Hello", "--model", "no/such-model"), "no/such-model"),
        (("Hello", "--model", "nope"), "nope"),
    ],
)
def test_bad_input_for_the_embedded_model(smollm2: Any, run: Any, args: tuple[str, ...], words: str) -> None:
    result = run("generate", "--runtime", "eager", "--method", "prompt-lookup", *args)
    assert result.exit_code == 2 and words in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
