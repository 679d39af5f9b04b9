"""`outrider generate`: text on standard output, the rest on standard error, JSON where asked."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.cli.paint import BRACKETS
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams


def test_the_text_and_only_the_text_is_on_standard_output(run: Any, engine: Any, text: str) -> None:
    result = run("generate", "Hello", "--stats")
    assert (result.exit_code, result.stdout) == (0, text + "\n")
    assert "accepted length" in result.stderr and "0.75 0.50" in result.stderr
    assert engine.closed


@pytest.mark.parametrize("flags", [["--no-stream"], []])
def test_the_chat_template_is_used_unless_raw(run: Any, engine: Any, text: str, flags: list[str]) -> None:
    assert run("generate", "Hello", *flags).stdout == text + "\n"
    assert run("generate", "Hello", "--raw", *flags).stdout == text + "\n"
    assert [prompt for prompt, _, _ in engine.requests] == [[{"role": "user", "content": "Hello"}], "Hello"]


def test_json_alone_owns_standard_output(run: Any, engine: Any, text: str) -> None:
    result = run("generate", "Hello", "--stats", "--show", "--json")
    payload = json.loads(result.stdout)
    assert payload["prompt"] == "Hello" and payload["method"] == "mix"
    assert payload["generations"][0]["text"] == text
    assert payload["generations"][0]["stats"]["mean_accepted"] == 11 / 5


def test_json_with_a_file_leaves_the_text_on_standard_output(run: Any, engine: Any, text: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    assert run("generate", "Hello", "--json", str(target)).stdout == text + "\n"
    assert json.loads(target.read_text())["generations"][0]["finish_reason"] == "eos"


@pytest.mark.parametrize("args", [["--json", "Hello"], ["--json", "-", "Hello"], ["--json", "--raw", "Hello"]])
def test_a_prompt_behind_json_is_still_the_prompt(run: Any, engine: Any, args: list[str]) -> None:
    assert json.loads(run("generate", *args).stdout)["prompt"] == "Hello"


def test_what_cannot_be_in_json_becomes_null(run: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.core.generation.Stats.as_dict", lambda self: {"worst": float("-inf")})
    stats = json.loads(run("generate", "Hello", "--json").stdout)["generations"][0]["stats"]
    assert stats == {"worst": None}


def test_show_marks_drafted_text_and_keeps_every_character(run: Any, engine: Any, text: str) -> None:
    result = run("generate", "Hello", "--show")
    assert f"{BRACKETS[0]} The rain falls{BRACKETS[1]} again" in result.stdout
    assert result.stdout.replace(BRACKETS[0], "").replace(BRACKETS[1], "") == text + "\n"
    assert "lookup" in result.stderr and "5 of 11 drafted" in result.stderr


def test_every_sampling_option_arrives(run: Any, engine: Any) -> None:
    args = (
        "-n 9 -t 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --logit-bias 4=-1.5 --logit-bias 5=-inf --bad-word rain --seed 11 --stop END "
        "--stop STOP --stop-token-id 8 --ignore-eos --min-new-tokens 2 --samples 2 --logprobs 1"
    ).split()
    assert run("generate", "Hello", *args).exit_code == 0
    _, params, extra = engine.requests[0]
    expected = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {4: -1.5, 5: float("-inf")}, "bad_words": (),
        "seed": 11, "stop": ("END", "STOP"), "stop_token_ids": (8,), "ignore_eos": True, "min_new_tokens": 2,
        "max_new_tokens": 9, "n": 2, "logprobs": 1, "prediction": (),
    }  # fmt: skip
    assert params == SamplingParams(**expected)
    assert extra == {"bad_words": ["rain"]}


def test_the_form_of_a_text_arrives_from_a_file_or_as_it_is(run: Any, engine: Any, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "dates.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "a"')
    asked: list[tuple[list[str], dict[str, Any]]] = [
        (["--json-schema", str(schema)], {"json_schema": '{"type": "integer"}'}),
        (["--json-schema", "{}", "--free-spacing"], {"json_schema": "{}", "free_spacing": True}),
        (["--grammar", str(grammar)], {"grammar": 'start: "a"'}),
        (["--grammar", 'root ::= "b"'], {"grammar": 'root ::= "b"'}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"choices": ("yes", "no")}),
    ]  # fmt: skip
    for args, expected in asked:
        assert run("generate", "Hello", *args).exit_code == 0
        assert engine.requests[-1][1] == SamplingParams(**expected)
    for args, said in (
        (["--json-schema", "{"], "json_schema is no JSON"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json: cannot be read"),
        (["--regex", "a", "--choice", "b"], "were both given"),
    ):
        result = run("generate", "Hello", *args)
        assert result.exit_code == 2 and said in result.stderr


def test_model_options_arrive(run: Any, engine: Any) -> None:
    args = "-m some/model --method draft-model -o budget=4 --draft x --device cpu --dtype float32 --revision main"
    args += " --runtime openvino --precision int8"
    assert run("generate", "Hello", *args.split(), "--trust-remote-code").exit_code == 0
    assert engine.loaded == {
        "model": "some/model", "method": "draft-model", "options": {"budget": 4, "draft": "x"}, "device": "cpu",
        "dtype": "float32", "revision": "main", "trust_remote_code": True, "memory": None, "runtime": "openvino",
        "precision": "int8", "tensor_parallel": 1,
    }  # fmt: skip


def test_a_prompt_from_a_file_and_from_standard_input(run: Any, engine: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("From a file é", encoding="utf-8")
    assert run("generate", "--raw", "--file", str(tmp_path / "p.txt")).exit_code == 0
    assert run("generate", "--raw", "-f", "-", input="From a pipe é".encode()).exit_code == 0
    assert [prompt for prompt, _, _ in engine.requests] == ["From a file é", "From a pipe é"]


def test_a_prediction_from_a_file_and_from_standard_input(run: Any, engine: Any, tmp_path: Path) -> None:
    expected = tmp_path / "expected.txt"
    expected.write_bytes("Ünder\r\nway".encode())
    assert run("generate", "Hello", "--prediction", str(expected)).exit_code == 0
    assert run("generate", "Hello", "--prediction", "-", input="piped").exit_code == 0
    assert run("generate", "Hello").exit_code == 0
    assert [extra.get("prediction") for _, _, extra in engine.requests] == ["Ünder\r\nway", "piped", None]


def test_a_cancelled_text_leaves_valid_json(run: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(handle: Any) -> Any:
        yield from ("The", " rain")
        handle.taken = 2
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.generate.on_interrupt", _pressed_once)
    engine.submit = _patched(engine.submit, cut)
    result = run("generate", "Hello", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["generations"][0]["text"] == "The rain"


def _patched(submit: Any, pieces: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        handle = submit(*args, **kwargs)
        handle.pieces = lambda: pieces(handle)
        return handle

    return wrapped


class _pressed_once:
    def __init__(self, act: Any) -> None:
        self.act = act

    def __enter__(self) -> list[bool]:
        self.act()
        return [True]

    def __exit__(self, *_: object) -> None:
        pass


BAD_INPUT = {  # TMP is the test's own folder
    "no prompt": ("", "there is no prompt"),
    "no prompt but a file for JSON": ("--json out.json", "there is no prompt"),
    "empty prompt": (" --raw", "the prompt is empty"),
    "blank file": ("-f TMP/blank.txt", "the prompt is empty"),
    "two prompts": ("Hello -f x", "both given"),
    "missing file": ("-f TMP/none", "no such file"),
    "folder": ("-f TMP", "is a folder"),
    "not UTF-8": ("-f TMP/latin.txt", "not UTF-8"),
    "unknown method": ("Hello --method nope", "known methods: plain"),
    "unknown option": ("Hello -o nope=1", "budget"),
    "option without value": ("Hello -o budget", "name=value"),
    "option of the wrong type": ("Hello -o budget=many", "budget"),
    "negative temperature": ("Hello -t -1", "temperature"),
    "top-p out of range": ("Hello --top-p 1.5", "top_p"),
    "no tokens": ("Hello -n 0", "max_new_tokens"),
    "broken bias": ("Hello --logit-bias x=1", "--logit-bias"),
    "empty bad word": ("Hello --bad-word ", "--bad-word is empty"),
    "empty stop": ("Hello --stop ", "stop string"),
    "missing prediction": ("Hello --prediction TMP/none", "none: no such file"),
    "prediction that is not UTF-8": ("Hello --prediction TMP/latin.txt", "not UTF-8"),
    "empty prediction": ("Hello --prediction TMP/empty.txt", "empty.txt: is empty"),
    "prompt and prediction from one stream": ("-f - --prediction -", "both come from standard input"),
    "JSON into nowhere": ("Hello --json TMP/no/such/out.json", "does not exist"),
    "JSON onto a folder": ("Hello --json TMP", "is a folder"),
}


@pytest.mark.parametrize(("args", "words"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(run: Any, engine: Any, tmp_path: Path, args: str, words: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "empty.txt").touch()
    result = run("generate", *(args.replace("TMP", str(tmp_path)).split(" ") if args else []))
    lines = result.stderr.strip().split("\n")
    assert result.exit_code == 2 and result.stdout == ""
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]
    assert engine.requests == []


def test_errors_of_the_engine_are_one_line_too(run: Any, engine: Any) -> None:
    engine.fails = InputError("the prompt has 9 tokens but the context holds 8; shorten it")
    result = run("generate", "Hello")
    assert result.exit_code == 2
    assert result.stderr == "error: the prompt has 9 tokens but the context holds 8; shorten it\n"


def test_a_defect_is_one_line_unless_debugging(run: Any, engine: Any) -> None:
    engine.fails = ZeroDivisionError("two\nlines")
    result = run("generate", "Hello")
    assert result.exit_code == 1 and result.stderr.startswith("error: ZeroDivisionError: two lines;")
    assert result.stderr.count("\n") == 1
    assert isinstance(run("--debug", "generate", "Hello").exception, ZeroDivisionError)


def test_origins_are_in_brackets_where_colours_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = import_module("outrider.cli.generate")  # `outrider.cli.generate` may be the command of that name
    monkeypatch.setattr(generate, "out", partial(Console, force_terminal=True, color_system="standard"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert generate._colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not generate._colours()
