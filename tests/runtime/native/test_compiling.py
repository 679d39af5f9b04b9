"""What a process of its own compiles is what a load asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest

from outrider.core.records import GREEDY, NO_NEEDS, Piece
from outrider.core.tree import root
from outrider.models.files.skeleton import of_gguf
from outrider.runtime.native import cache, compiling, held
from outrider.runtime.native.backend import NativeBackend
from outrider.runtime.native.kernels.team import Team
from outrider.runtime.native.packing import pack_files
from outrider.runtime.slots import SlotTarget
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The types that compiled functions are called with, which each are compiled for."""
    seen: set[Any] = set()
    run, move = Team.run, cache._move

    def noted(self: Team, function: Any, *given: Any) -> None:
        seen.add((function.py_func.__name__, tuple(map(numba.typeof, given))))
        run(self, function, *given)

    def moved(*given: Any) -> None:
        seen.add(("move", tuple(map(numba.typeof, given))))
        move(*given)

    monkeypatch.setattr(Team, "run", noted)
    monkeypatch.setattr(cache, "_move", moved)
    return seen


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_load_of_packed_weights_asks_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: set[Any], precision: str, tied: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiling.run_once(precision)
    beforehand = set(calls)
    calls.clear()
    write_gguf(tiny_gguf_model(tied), tmp_path / "tiny.gguf", packed=True)
    skeleton = of_gguf(tmp_path / "tiny.gguf")
    assert skeleton is not None and skeleton.tied == tied
    pack_files(tmp_path / "packed", skeleton, precision, {"model": "tiny"})
    target = SlotTarget(NativeBackend(None, precision=precision, held=held.read(tmp_path / "packed")))
    slot = target.acquire()
    target.run([Piece(slot, [3, 4, 5])], NO_NEEDS)
    target.run([Piece(slot, tree=root(6))], GREEDY)
    target.commit([slot], [[]])
    assert {name for name, _ in calls} == {"step", "move"} and calls == beforehand


def test_a_large_model_is_packed_while_another_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []
    started = compiling.subprocess.Popen

    def noted(command: list[str], **options: Any) -> Any:
        begun.append(command)
        return started([*command[:1], "-c", "raise SystemExit(3)"], **options)

    monkeypatch.setattr(compiling.subprocess, "Popen", noted)
    with compiling.compiled_meanwhile("int8", compiling.WORTH_IT - 1):
        assert not begun
    with compiling.compiled_meanwhile("int8", compiling.WORTH_IT):  # and one that fails hurts nobody
        assert begun[0][1:] == ["-m", "outrider.runtime.native.compiling", "int8"]
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError("planted")))
    with compiling.compiled_meanwhile("int8", compiling.WORTH_IT):
        pass


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    started = compiling.subprocess.Popen

    def noted(command: list[str], **options: Any) -> Any:
        begun.append(started([*command[:1], "-c", "import time; time.sleep(600)"], **options))
        return begun[0]

    monkeypatch.setattr(compiling.subprocess, "Popen", noted)
    with pytest.raises(KeyboardInterrupt), compiling.compiled_meanwhile("int8", compiling.WORTH_IT):
        raise KeyboardInterrupt
    assert begun[0].poll() is not None
