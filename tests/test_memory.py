"""Memory files: what is kept comes back, and no file, however broken, stops a run or is half read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider import methods
from outrider.api import Outrider
from outrider.draft.prompt_lookup import PromptLookup
from outrider.errors import InputError
from outrider.memory import collect, read_memory, recall, write_memory
from outrider.methods import MethodInfo
from outrider.protocols import Recipe

ARRAYS = {"a/ids": np.arange(12, dtype=np.int32).reshape(3, 4), "a/odds": np.array([0.25, 0.5]), "b/ids": np.zeros(0)}


@dataclass(slots=True)
class Learner(PromptLookup):
    """Prompt lookup that counts the requests it has seen."""

    name: str = "learner"
    seen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def end(self, slot: int) -> None:
        PromptLookup.end(self, slot)
        self.seen[0] += 1

    def memory(self) -> dict[str, NDArray[Any]]:
        return {"seen": self.seen}

    def remember(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if arrays["seen"].shape != (1,):
            raise InputError("one count is wanted")
        self.seen = arrays["seen"].copy()

    def forget(self) -> None:
        self.seen = np.zeros(1, dtype=np.int64)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_memory(tmp_path / "m", ARRAYS, "model")
    kept = read_memory(tmp_path / "m", "model")
    assert kept.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert kept[name].dtype == array.dtype and np.array_equal(kept[name], array)


@given(data=st.data())
def test_a_torn_or_damaged_file_is_ignored_with_a_warning(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("torn") / "m"
    write_memory(path, ARRAYS, "model")
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :])
    assert read_memory(path, "model") == {}


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"[]\n", b"\x00\xff" * 50, b'{"outrider-memory": 99}\nx'])
def test_any_other_file_is_ignored(tmp_path: Path, content: bytes, caplog) -> None:
    (tmp_path / "m").write_bytes(content)
    with caplog.at_level(logging.WARNING, "outrider"):
        assert read_memory(tmp_path / "m", "model") == {}
    assert "is ignored" in caplog.text


def test_the_memory_of_another_model_is_ignored(tmp_path: Path, caplog) -> None:
    write_memory(tmp_path / "m", ARRAYS, "model")
    with caplog.at_level(logging.WARNING, "outrider"):
        assert read_memory(tmp_path / "m", "other") == {}
    assert "another model" in caplog.text


def test_a_place_that_can_hold_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing" / "m"):
        with pytest.raises(InputError, match="name a file|create it first"):
            read_memory(place, "model")


def test_arrays_that_do_not_fit_leave_the_drafter_as_new(caplog) -> None:
    drafter = Learner()
    drafter.seen[0] = 5
    with caplog.at_level(logging.WARNING, "outrider"):
        recall(drafter, {"learner/seen": np.zeros(7)})
    assert drafter.seen.tolist() == [0] and "one count is wanted" in caplog.text


def test_only_drafters_that_remember_are_asked() -> None:
    assert collect([None, PromptLookup(), Learner()]).keys() == {"learner/seen"}


@pytest.fixture
def learner(monkeypatch) -> MethodInfo:
    plain = methods.find("plain")

    def build(parts: Any, options: Any) -> Recipe:
        made = plain.build(parts, options)
        return Recipe("learner", Learner(), made.verifier, made.controller)

    info = MethodInfo("learner", "", "-", "test", True, "nothing", plain.options, build)
    monkeypatch.setitem(methods._METHODS, "learner", info)
    return info


def test_a_second_run_goes_on_from_the_first_and_keeps_the_memory_of_other_methods(
    tmp_path: Path, tiny_llama, learner: MethodInfo
) -> None:
    path = tmp_path / "memory"
    for already in range(2):
        with Outrider(tiny_llama, "learner", memory=path) as engine:
            drafter = engine.recipe().drafter
            assert isinstance(drafter, Learner) and drafter.seen.tolist() == [already]
            engine.generate([[1, 2, 3]], max_new_tokens=2)
    with Outrider(tiny_llama, "plain", memory=path) as engine:
        engine.generate([[1, 2, 3]], max_new_tokens=2)
    assert read_memory(path, tiny_llama.fingerprint)["learner/seen"].tolist() == [2]


def test_an_interrupted_run_keeps_its_memory(tmp_path: Path, tiny_llama, learner: MethodInfo) -> None:
    with pytest.raises(KeyboardInterrupt), Outrider(tiny_llama, "learner", memory=tmp_path / "m") as engine:
        engine.generate([[1, 2, 3]], max_new_tokens=2)
        raise KeyboardInterrupt
    assert read_memory(tmp_path / "m", tiny_llama.fingerprint)["learner/seen"].tolist() == [1]
