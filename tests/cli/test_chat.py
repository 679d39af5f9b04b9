"""`outrider chat` over a pipe: history, commands, and answers that were stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def contents(prompt: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in prompt]


def test_history_is_kept_and_each_answer_has_a_status_line(run: Any, engine: Any, text: str) -> None:
    result = run("chat", "--system", "Be brief.", input="Hello\n\nMore?\n")
    assert (result.exit_code, result.stdout) == (0, f"{text}\n{text}\n")
    assert [contents(prompt) for prompt, _, _ in engine.requests] == [
        ["Be brief.", "Hello"],
        ["Be brief.", "Hello", text, "More?"],
    ]
    assert result.stderr.count("accepted length 2.20") == 2 and "22.0 tokens/s" in result.stderr


def test_reset_forgets_all_but_the_system_message(run: Any, engine: Any) -> None:
    run("chat", "--system", "Be brief.", input="Hello\n/reset\nAgain\n")
    assert contents(engine.requests[1][0]) == ["Be brief.", "Again"]


def test_stats_pool_the_answers_and_exit_leaves(run: Any, engine: Any) -> None:
    result = run("chat", input="/stats\nHello\nMore\n/stats\n/exit\nnever asked\n")
    assert "nothing was said yet" in result.stderr
    assert "22 new after 10 of the prompt" in result.stderr and len(engine.requests) == 2


def test_an_unknown_command_shows_the_known_ones(run: Any, engine: Any) -> None:
    assert "/reset forgets" in run("chat", input="/what\n").stderr.split("\n", 1)[1]
    assert engine.requests == []


def test_a_stopped_answer_stays_in_the_history_as_far_as_it_went(run: Any, engine: Any) -> None:
    engine.cancel_at = 1
    result = run("chat", input="Hello\nMore\n")
    assert "stopped" in result.stderr
    assert contents(engine.requests[1][0]) == ["Hello", "", "More"]


def test_a_conversation_too_long_for_the_context_can_go_on_after_reset(run: Any, engine: Any) -> None:
    result = run("chat", input="1\n2\n3\n4\ntoo long\n/reset\nagain\n")
    assert result.exit_code == 0 and "/reset begins anew" in result.stderr
    assert contents(engine.requests[-1][0]) == ["again"]


@pytest.mark.parametrize("args", [["--samples", "2"], ["-t", "-1"], ["--method", "nope"]])
def test_bad_options_are_refused_before_the_model_is_loaded(run: Any, engine: Any, args: list[str]) -> None:
    result = run("chat", *args, input="Hello\n")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and engine.loaded == {}


def test_a_retry_asks_the_same_again_and_continue_goes_on_with_the_answer(run: Any, engine: Any, text: str) -> None:
    run("chat", input="Hello\n/retry\n/continue\nMore\n")
    asked = [prompt for prompt, _, _ in engine.requests]
    assert contents(asked[0]) == contents(asked[1]) == ["Hello"]
    assert asked[2][0] == "goes on" and contents(asked[2][1]) == ["Hello", text]
    assert contents(asked[3]) == ["Hello", text + text, "More"]


def test_a_system_message_can_change_and_another_method_be_chosen(run: Any, engine: Any) -> None:
    result = run("chat", "--system", "Be brief.", input="One\n/system Be long.\n/method plain\nTwo\n/system\nThree\n")
    assert contents(engine.requests[1][0])[0] == "Be long."
    assert contents(engine.requests[2][0])[0] == "One"
    assert "· mix ·" in result.stderr and "· plain" in result.stderr


@pytest.mark.parametrize("command", ["/retry", "/continue", "/method nope", "/save", "/load nowhere.json"])
def test_a_command_that_cannot_be_followed_says_why_and_the_chat_goes_on(run: Any, engine: Any, command: str) -> None:
    result = run("chat", input=f"{command}\nHello\n")
    assert result.exit_code == 0 and "error: " in result.stderr and len(engine.requests) == 1


def test_a_conversation_is_kept_and_gone_on_with(run: Any, engine: Any, text: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    run("chat", "--system", "Be brief.", input=f"Hello\n/save {file}\n")
    run("chat", input=f"/load {file}\nMore\n")
    assert contents(engine.requests[-1][0]) == ["Be brief.", "Hello", text, "More"]
    file.write_text("my notes")
    assert "is no conversation" in run("chat", input=f"Hello\n/save {file}\n").stderr
    assert file.read_text() == "my notes"


def test_a_message_may_have_several_lines(run: Any, engine: Any) -> None:
    run("chat", input='one\\\ntwo\n"""\nthree\n\nfour\n"""\n')
    assert [contents(prompt)[-1] for prompt, _, _ in engine.requests] == ["one\ntwo", "three\n\nfour"]


def test_the_status_line_says_what_plain_decoding_would_have_taken(run: Any, engine: Any) -> None:
    assert "0.5 s, plainly about 2.2 s" in " ".join(run("chat", input="Hello\n").stderr.split())
