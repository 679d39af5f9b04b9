"""What is said while a start takes long is what happens: what a cache holds is not called compiled or timed."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider import methods
from outrider.api import Outrider
from outrider.control import cost
from outrider.methods import common
from outrider.methods.common import told_if_compiling

SOURCE = """
from outrider.core.numeric.compiled import compiled

@compiled
def total(values):
    sum = 0.0
    for value in values:
        sum += value
    return sum
"""


def used_anew(path: Path) -> float:
    """As a new process would: the module is read again and knows no compiled function but those of the cache."""
    spec = importlib.util.spec_from_file_location("made_up", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return float(module.total((1.0, 2.0)))


def test_compiling_is_announced_when_it_happens_and_not_when_the_cache_has_it(tmp_path: Path, caplog) -> None:
    path = tmp_path / "made_up.py"
    path.write_text(SOURCE)
    with told_if_compiling("a sum", after=0):
        assert used_anew(path) == 3
    assert "compiling a sum for this machine" in caplog.text
    caplog.clear()
    with told_if_compiling("a sum", after=0):
        assert used_anew(path) == 3
    assert caplog.text == ""


def test_timing_the_model_is_announced_when_it_happens_and_not_when_the_cache_has_it(
    tiny_llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def noted(what: str, after: float = 0) -> Any:
        said.append(what)
        yield

    monkeypatch.setattr(common, "told_if_slow", noted)
    monkeypatch.setattr(cost, "user_cache_path", lambda _: tmp_path)
    with Outrider(tiny_llama, "plain", limits={"max_slots": 1}) as engine:
        engine.recipe("mix")
        assert [what for what in said if "timing" in what] != []
        said.clear()
        methods.build("mix", engine._parts)
        assert said == []
