"""The files of a store: whole or refused, whatever was done to them; the same answers after reopening and elsewhere."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from outrider.core.errors import InputError
from outrider.store.format import FIXED, HEADER, MANIFEST, check_shard
from outrider.store.store import open_store
from tests.store.conftest import make_store

SHARDS = [[[0, 1, 2, 3, 0, 1]], [[2, 0, 1, 1], [3]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "store", SHARDS)
    return tmp_path / "store"


def header(path: Path) -> dict:
    head = path.read_bytes()[:HEADER]
    return json.loads(head[FIXED.size : FIXED.size + FIXED.unpack_from(head)[2]])


def rewrite(path: Path, **changes: object) -> None:
    """Another description, with the checksum that belongs to it."""
    content = bytearray(path.read_bytes())
    text = json.dumps(header(path) | changes).encode()
    content[:HEADER] = (FIXED.pack(b"outrider", 1, len(text), zlib.crc32(text)) + text).ljust(HEADER, b"\0")
    path.write_bytes(content)


def test_a_reopened_store_answers_the_same(folder: Path) -> None:
    first, again = make_store(folder.parent / "other", SHARDS), open_store(folder)
    for one, other in zip(first.shards, again.shards, strict=True):
        assert one.path.read_bytes() == other.path.read_bytes()
    assert again.count(np.array([0, 1])) == 3
    assert not again.shards[0].tokens.flags.writeable


def test_a_file_cut_anywhere_is_refused(folder: Path) -> None:
    path = folder / "00000.shard"
    whole = path.read_bytes()
    sections = header(path)["sections"].values()
    borders = {0, 4, FIXED.size, HEADER - 1, HEADER, len(whole) - 1}
    borders |= {s["offset"] for s in sections} | {s["offset"] + s["bytes"] // 2 for s in sections}
    for size in sorted(borders - {len(whole)}):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="outrider index build"):
            open_store(folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(InputError, match="should have"):
        open_store(folder)


@pytest.mark.parametrize("where", [9, FIXED.size + 3])
def test_a_damaged_header_is_refused(folder: Path, where: int) -> None:
    path = folder / "00000.shard"
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="version|damaged"):
        open_store(folder)


def test_damage_inside_is_found_by_the_full_check(folder: Path) -> None:
    path = folder / "00000.shard"
    check_shard(path)
    whole = path.read_bytes()
    for name, section in header(path)["sections"].items():
        content = bytearray(whole)
        content[section["offset"]] ^= 1
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"{name} are damaged"):
            check_shard(path)


def test_another_version_byte_order_or_tokenizer_is_refused(folder: Path) -> None:
    path = folder / "00000.shard"
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + struct.pack("<I", 2) + whole[12:])
    with pytest.raises(InputError, match="format version 2"):
        open_store(folder)
    path.write_bytes(whole)
    rewrite(path, byte_order="big" if sys.byteorder == "little" else "little")
    with pytest.raises(InputError, match="byte order"):
        open_store(folder)
    path.write_bytes(whole)
    rewrite(path, fingerprint="another")
    with pytest.raises(InputError, match="another tokenizer"):
        open_store(folder)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="built with the tokenizer of 'ids'.*index build --tokenizer"):
        open_store(folder, "0123456789abcdef")
    open_store(folder, "token ids")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 9}', '"text"'])
def test_a_manifest_that_is_none_is_refused(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content)
    with pytest.raises(InputError, match="outrider index build"):
        open_store(folder)


def test_a_missing_store_or_shard_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match="no store here"):
        open_store(folder.parent / "nothing")
    (folder / "00001.shard").unlink()
    with pytest.raises(InputError, match="00001.shard: cannot be read"):
        open_store(folder)


def test_two_processes_read_one_store(folder: Path) -> None:
    mine = open_store(folder)
    asked = "import sys, numpy as np; from outrider.store.store import open_store; "
    asked += "print(open_store(sys.argv[1]).count(np.array([0, 1])))"
    other = subprocess.run([sys.executable, "-c", asked, str(folder)], capture_output=True, text=True, check=True)
    assert int(other.stdout) == mine.count(np.array([0, 1])) == 3


def test_a_store_that_is_replaced_keeps_its_readers(folder: Path) -> None:
    mine = open_store(folder)
    shutil.rmtree(folder)
    assert mine.count(np.array([0, 1])) == 3
