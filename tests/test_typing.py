"""Keyword arguments are typed: a typo fails under `mypy --strict`, and the types keep to the parameters."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from mypy import api as mypy

import outrider
from outrider.api import Outrider, load
from outrider.core.params import SamplingArguments, SamplingParams

PACKAGE = Path(outrider.__file__).parent
METHODS = ["generate", "agenerate", "chat", "stream", "astream", "submit"]
GOOD = """
import outrider

engine: outrider.Outrider
settings: outrider.SamplingArguments = {"top_p": 0.9, "stop": "end"}
engine.generate(["a", "b"], [outrider.SamplingParams(), outrider.SamplingParams(n=2)], max_new_tokens=5)
engine.generate([[1, 2], [3]], bad_words=["no", [1, 2]], prediction="text")
engine.stream("a", **settings)
engine.chat([{"role": "user", "content": [{"type": "text", "text": "a"}]}], temperature=1, seed=None, method="plain")
engine.submit([1, 2], outrider.SamplingParams().with_(stop=["a"]), logit_bias={5: -1.0})


async def use() -> None:
    async for piece in engine.astream("a", logprobs=2):
        print(piece.upper())
    print((await engine.agenerate("a", ignore_eos=True))[0])
"""


def complaints(source: str, folder: Path) -> list[tuple[str, str]]:
    """Lines of a caller's file and what `mypy --strict` says of them; follows only what callers see, which is quick."""
    file = folder / "caller.py"
    file.write_text(source, encoding="utf-8")
    seen = [str(PACKAGE / name) for name in ("__init__.py", "api.py", "core/inputs.py", "core/params.py")]
    flags = ["--strict", "--follow-imports=skip", "--config-file=", f"--cache-dir={folder / 'cache'}"]
    flags += ["--namespace-packages", "--explicit-package-bases", "--no-pretty", "--no-color-output"]
    said, failed, _ = mypy.run([*flags, str(file), *seen])
    assert not failed, failed
    return re.findall(r"caller\.py:(\d+): error: (.*)", said)


def test_a_typo_fails_under_a_strict_checker_and_right_calls_pass(tmp_path: Path) -> None:
    bad = [
        *(f'{method} = engine.{method}("a", tempreature=1)' for method in METHODS),
        'engine.generate("a", temperature="hot")',
        "outrider.SamplingParams().with_(topp=0.5)",
        'engine.stream("a", [outrider.SamplingParams()])',
    ]
    said = complaints(GOOD + "\n".join(bad) + "\n", tmp_path)
    first = GOOD.count("\n") + 1
    assert [line for line, _ in said] == [str(first + i) for i in range(len(bad))], said
    assert all("tempreature" in why for _, why in said[: len(METHODS)])


def test_typed_arguments_are_the_parameters() -> None:
    assert list(get_type_hints(SamplingArguments)) == [field.name for field in fields(SamplingParams)]
    assert not SamplingArguments.__required_keys__


def test_every_parameter_is_described_with_its_default() -> None:
    described = dict(re.findall(r"^ *(\w+) \((.+?)\): \S", SamplingParams.__doc__ or "", re.MULTILINE))
    defaults = {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(SamplingParams)}  # type: ignore[misc]
    assert described == {name: repr(default) for name, default in defaults.items()}


@pytest.mark.parametrize("name", METHODS)
def test_methods_say_what_they_do_by_default(name: str) -> None:
    text = " ".join((inspect.getdoc(getattr(Outrider, name)) or "").split())
    said = f"at most {SamplingParams().max_new_tokens} new tokens"
    assert said in text or re.search(r"(twin|as) of `(generate|stream)`", text)


def test_load_describes_every_argument_and_the_defaults_it_has() -> None:
    text = " ".join((load.__doc__ or "").split())
    of = inspect.signature(load).parameters
    assert not [name for name in of if f"`{name}`" not in text]
    for name, stated in re.findall(r'`(\w+)` \("?(\w+)"?\)', text):
        assert stated == str(of[name].default)
