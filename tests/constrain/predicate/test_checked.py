"""Predicates on a running engine: the text is what a mask gives, and a predicate that fails hurts one request."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.check.toy import ToyLM
from outrider.constrain.finite import Finite
from outrider.constrain.predicate.checked import Checked
from outrider.constrain.predicate.limited import InProcess, InThread
from outrider.constrain.predicate.stepwise import Stepwise
from outrider.core.errors import EmptySupport, InputError, PredicateFailed
from outrider.core.params import SamplingParams
from tests.constrain.languages import PROMPT, language, random_texts, toy_engine
from tests.constrain.predicate import json_prefix

DRAWN = SamplingParams(temperature=1.0, max_new_tokens=12, n=4)
LETTERS = "abcdefgh"
END = 7


def decode(tokens) -> str:
    return "".join(LETTERS[token] for token in tokens if token != END)


def of(viable, complete=None, seconds=1.0, max_calls=1000) -> Checked:
    functions = {"viable": viable} | ({"complete": complete} if complete else {})
    return Checked(InThread(functions, seconds), decode, {END}, max_calls=max_calls)


ENDLESS = Finite([{0: 1, 1: 0, 2: 2}, {1: 2, 2: 0, 0: 0}, {1: 1}], frozenset({0, 1}), 3)  # goes on for ever


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_with_equal_seeds_the_text_is_the_one_a_mask_gives(temperature: float, drafted: bool) -> None:
    """Together with the other parameters 200 runs."""
    runs = 0
    for seed in range(9):
        engine = toy_engine(ToyLM(3, seed=seed), drafted)
        params = replace(DRAWN, temperature=temperature, seed=seed)
        masked = engine.submit(PROMPT, params, constraint=ENDLESS).results()
        asked = engine.submit(PROMPT, params, constraint=Stepwise(ENDLESS, PROMPT)).results()
        assert [g.token_ids for g in asked] == [g.token_ids for g in masked]
        runs += len(masked)
    assert runs == 36


def test_a_function_over_the_text_draws_what_the_mask_of_its_language_draws() -> None:
    texts = [(*text, END) for text in random_texts(3)]
    strings = {decode(text) for text in texts}
    lm = ToyLM(8, seed=5, concentration=0.5)
    engine = toy_engine(lm)
    engine.eos_ids = frozenset({END})
    table = language([text[:-1] for text in texts], 8)
    predicate = of(lambda text: any(one.startswith(text) for one in strings), lambda text: text in strings)
    for seed in range(5):
        params = replace(DRAWN, seed=seed)
        masked = engine.submit(PROMPT, params, constraint=table).results()
        asked = engine.submit(PROMPT, params, constraint=predicate).results()
        assert [g.token_ids for g in asked] == [g.token_ids for g in masked]
        assert all(decode(g.token_ids) in strings for g in asked)
    assert predicate.calls <= 8 * predicate.asked


def test_a_predicate_that_raises_loops_or_refuses_all_is_named_and_others_go_on() -> None:
    def raises(text: str) -> bool:
        return 1 // (len(text) - 3) > 5 or True

    def loops(text: str) -> bool:
        while len(text) > 2:
            pass
        return True

    engine = toy_engine(ToyLM(8, seed=5))
    params = replace(DRAWN, n=1, seed=1)
    good = engine.submit(PROMPT, params, constraint=of(lambda text: True))
    bad = [
        (engine.submit(PROMPT, params, constraint=of(raises)), PredicateFailed, "viable raised ZeroDivisionError"),
        (engine.submit(PROMPT, params, constraint=of(loops, seconds=0.2)), PredicateFailed, "no answer in 0.2 s"),
        (engine.submit(PROMPT, params, constraint=of(lambda text: False)), EmptySupport, "lets none"),
    ]
    for handle, kind, message in bad:
        with pytest.raises(kind, match=message):
            handle.results()
    assert good.result().token_ids == engine.submit(PROMPT, params).result().token_ids


def test_the_model_may_end_only_where_the_text_is_complete() -> None:
    engine = toy_engine(ToyLM(8, seed=2, concentration=2.0))
    engine.eos_ids = frozenset({END})
    params = replace(DRAWN, seed=3, max_new_tokens=60)
    predicate = of(lambda text: True, lambda text: text.endswith("d"))
    drawn = [g.token_ids for g in engine.submit(PROMPT, params, constraint=predicate).results()]
    ended = [decode(tokens) for tokens in drawn if tokens[-1] == END]
    assert ended and all(text.endswith("d") for text in ended)
    assert not any(END in tokens[:-1] for tokens in drawn)


def test_truncation_beside_a_predicate_is_refused() -> None:
    with pytest.raises(InputError, match="leave out top_k"):
        toy_engine(ToyLM(8)).submit(PROMPT, replace(DRAWN, top_k=2), constraint=of(lambda text: True))


def test_a_file_is_asked_in_a_process_that_is_killed_and_begun_again(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text(
        "import re\nprint('hello')\n"
        "def viable(text):\n    return re.fullmatch('(a+)+', text) is not None if 'x' in text else text != 'no'\n"
        "def complete(text):\n    return {'a': 1}[text] == 1\n"
    )
    judge = InProcess(file, seconds=0.5)
    assert judge("viable", "yes") and not judge("viable", "no") and judge("complete", "a")
    with pytest.raises(PredicateFailed, match="KeyError"):
        judge("complete", "b")
    begun = time.perf_counter()
    with pytest.raises(PredicateFailed, match="no answer in 0.5 s"):
        judge("viable", "a" * 60 + "x")  # a regular expression that backtracks for ever
    assert time.perf_counter() - begun < 30  # it came back at all
    assert judge("viable", "yes")
    judge.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [("def f(): pass", "no function viable"), ("1 / 0", "ZeroDivisionError"), ("def viable(", "SyntaxError")],
)
def test_a_file_that_is_no_predicate_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "rules.py"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        InProcess(file).has("viable")
    with pytest.raises(InputError, match="no such file"):
        InProcess(tmp_path / "none.py")
    with pytest.raises(InputError, match="above 0"):
        InProcess(file, 0)


def test_the_predicate_for_json_knows_every_beginning_of_json() -> None:
    """Guards the tests that count calls on JSON."""
    text = '{"a": [1, -2.5e3, "x\\n\\u00e9"], "b": {"c": null, "d": true}, "e": []}'
    assert all(json_prefix.viable(text[:end]) for end in range(len(text) + 1)) and json_prefix.complete(text)
    for bad in (
        "{a",
        '{"a" 1',
        '{"a": 01',
        '{"a": 1}}',
        '{"a": tru1',
        '{"a": [1 2',
        '{"a": 1, }',
        '{"a":  1',
        "[",
        '{"\n',
    ):
        assert not json_prefix.viable(bad), bad
