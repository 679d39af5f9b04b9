"""Memory files: what is kept comes back, nothing is half read, and no file that is not ours is ever replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import outrider
from outrider import methods
from outrider.api import Outrider
from outrider.core.errors import InputError
from outrider.core.protocols import Recipe
from outrider.draft.lookup.prompt_lookup import PromptLookup
from outrider.methods import MethodInfo, registry
from outrider.store.memory import collect, read_memory, recall, write_memory

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
def test_a_torn_or_damaged_file_is_refused_with_the_remedy(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("torn") / "m"
    write_memory(path, ARRAYS, "model")
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(1, len(whole) - 1))])
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :])
    with pytest.raises(InputError, match="or remove this one"):
        read_memory(path, "model")


@pytest.mark.parametrize("content", [b"\n", b"{}\n", b"[]\n", b"notes", b"\x00\xff" * 50])
def test_any_other_file_is_refused_without_a_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(InputError, match="another kind of file"):
        read_memory(tmp_path / "m")


def test_a_memory_of_another_version_or_a_damaged_one_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_memory(path, ARRAYS, "model")
    whole = path.read_bytes()
    for content, why in (
        (b'{"outrider-memory": 99}\nx', "another version"), (whole[:40], "torn"), (whole[:-1], "torn"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(InputError, match=why):
            read_memory(path)


def test_an_empty_file_is_a_memory_to_be(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    assert read_memory(tmp_path / "m", "model") == {}


def test_the_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    write_memory(tmp_path / "m", ARRAYS, "model")
    assert read_memory(tmp_path / "m")
    with pytest.raises(InputError, match="another model"):
        read_memory(tmp_path / "m", "other")


def test_a_place_that_can_hold_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for place, why in ((tmp_path, "is a folder"), (tmp_path / "missing" / "m", "does not exist")):
        with pytest.raises(InputError, match=why):
            read_memory(place)


def test_arrays_that_do_not_fit_are_refused_and_leave_the_drafter_as_new() -> None:
    drafter = Learner()
    drafter.seen[0] = 5
    with pytest.raises(InputError, match="one count is wanted"):
        recall(drafter, {"learner/seen": np.zeros(7)})
    assert drafter.seen.tolist() == [0]


def test_only_drafters_that_remember_are_asked() -> None:
    assert collect([None, PromptLookup(), Learner()]).keys() == {"learner/seen"}


@pytest.fixture
def learner(monkeypatch) -> MethodInfo:
    plain = methods.find("plain")

    def build(parts: Any, options: Any) -> Recipe:
        made = plain.build(parts, options)
        return Recipe("learner", Learner(), made.verifier, made.controller)

    info = MethodInfo("learner", "", "-", "test", True, "nothing", plain.options, build)
    monkeypatch.setitem(registry._METHODS, "learner", info)
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


def test_a_file_that_is_no_memory_is_refused_before_the_model_is_read_and_stays(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not to be lost")
    with pytest.raises(InputError, match=r"notes\.txt: is another kind of file"):
        outrider.load(str(tmp_path / "no such model"), memory=notes)
    assert notes.read_text() == "not to be lost"


def test_saving_replaces_a_memory_of_this_model_and_nothing_else(
    tmp_path: Path, tiny_llama, learner: MethodInfo
) -> None:
    notes, other, memory = tmp_path / "notes.txt", tmp_path / "other", tmp_path / "memory"
    notes.write_text("not to be lost")
    write_memory(other, ARRAYS, "another model")
    with Outrider(tiny_llama, "learner") as engine:
        for path in (notes, other):
            before = path.read_bytes()
            with pytest.raises(InputError, match="name another file"):
                engine.save_memory(path)
            assert path.read_bytes() == before
        for _ in range(2):
            engine.save_memory(memory)
    assert read_memory(memory, tiny_llama.fingerprint).keys() == {"learner/seen"}


def test_the_memory_of_another_mixture_is_refused_and_stays(tmp_path: Path, tiny_llama) -> None:
    path = tmp_path / "memory"
    parts = {"parts": "suffix,predicted"}
    with Outrider(tiny_llama, "mix", parts, {"max_slots": 1}, memory=path) as engine:
        engine.generate([[1, 2, 3]], max_new_tokens=2)
    before = path.read_bytes()
    for others in ("suffix", "suffix,token-recycling"):
        with pytest.raises(InputError, match="memory: .*another mixture"):
            Outrider(tiny_llama, "mix", {"parts": others}, {"max_slots": 1}, memory=path)
    assert path.read_bytes() == before
    with Outrider(tiny_llama, "mix", parts, {"max_slots": 1}, memory=path) as engine:
        engine.recipe("mix", {"parts": "suffix"})  # whose memory is never saved
