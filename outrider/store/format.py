"""The files of a store: a manifest, and shards that are there whole or not at all.

A shard is one file: a header (magic, version, a checksum of the header itself), then three arrays, little-endian: the
tokens (16 bits where the vocabulary allows, else 32), the sorted suffixes (32 bits each), and where each first token
begins among them. Opening maps the file and compares sizes; it reads nothing else. The checksums of the arrays are
there for `check_shard`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InputError
from outrider.core.files import write_atomic

MAGIC, VERSION = b"outrider", 1
HEADER = 4096
FIXED = struct.Struct("<8sIII")  # magic, version, length and checksum of the description that follows
MANIFEST = "store.json"
COMPACT = ".fm"  # how the files of an FM-index end
SHARD_TYPES = {"suffixes": "<u4", "starts": "<u4"}
BLOCK = 1 << 22  # entries written at a time
REBUILD = "build the store again with: outrider index build"

Part = Callable[[], Iterator[NDArray[Any]]]  # a section of a file, in pieces


@dataclass(slots=True)
class CorpusEntry:
    """A corpus that was indexed, or is being indexed: `next` is the file and byte to go on at, None when done."""

    path: str
    fingerprint: str
    files: int
    bytes: int
    settings: dict[str, Any]
    skipped_files: int = 0
    skipped_lines: int = 0
    next: list[int] | None = field(default_factory=lambda: [0, 0])


@dataclass(slots=True)
class Manifest:
    tokenizer: str  # the name it was loaded by
    fingerprint: str
    vocabulary: int  # all token ids are below
    corpora: list[CorpusEntry] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)  # file names
    made: int = 0  # shards ever made: the number of the next one

    @property
    def width(self) -> int:
        return 2 if self.vocabulary < 0xFFFF else 4

    @property
    def unfinished(self) -> CorpusEntry | None:
        return next((entry for entry in self.corpora if entry.next is not None), None)


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard, mapped read-only."""

    path: Path
    tokens: NDArray[Any]
    suffixes: NDArray[np.uint32]
    starts: NDArray[np.uint32]
    documents: int

    @property
    def bytes(self) -> int:
        return HEADER + sum(array.nbytes for array in (self.tokens, self.suffixes, self.starts))


def separator(width: int) -> int:
    """Larger than any token of that width in bytes."""
    return (1 << (8 * width)) - 1


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.pop("format") != VERSION:
            raise InputError(f"{folder}: a store of another format version; {REBUILD}")
        return Manifest(**{**stored, "corpora": [CorpusEntry(**entry) for entry in stored["corpora"]]})
    except OSError:
        raise InputError(f"{folder}: no store here ({MANIFEST} is missing); {REBUILD}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read ({type(error).__name__}: {error}); {REBUILD}") from error


def is_compact(manifest: Manifest) -> bool:
    """Whether its files are FM-indexes; of one whose making was interrupted, some."""
    return any(name.endswith(COMPACT) for name in manifest.shards)


def refuse_compact(folder: Path, manifest: Manifest) -> None:
    if is_compact(manifest):
        raise InputError(f"{folder}: a compact store (--fm), which is for: outrider find; build another without --fm")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomic(folder / MANIFEST, json.dumps({"format": VERSION, **asdict(manifest)}, indent=1) + "\n")


def write_shard(
    path: Path, tokens: NDArray[Any], suffixes: Iterator[NDArray[np.uint32]], starts: NDArray[np.uint32],
    documents: int, fingerprint: str,
) -> None:  # fmt: skip
    """Changes the folder. The suffixes come in pieces."""
    native = tokens.dtype.newbyteorder("<")
    parts: dict[str, Part] = {
        "tokens": lambda: (tokens[i : i + BLOCK].astype(native) for i in range(0, len(tokens), BLOCK)),
        "suffixes": lambda: suffixes,
        "starts": lambda: iter([starts]),
    }
    write_sections(path, parts, {"width": tokens.dtype.itemsize, "documents": documents, "fingerprint": fingerprint})


def write_sections(path: Path, parts: dict[str, Part], described: dict[str, Any]) -> None:
    """Changes the folder: writes beside, to the disk, then renames. Arrays are little-endian."""
    scratch = path.with_name(f".{path.name}.partial")
    sections: dict[str, dict[str, int]] = {}
    try:
        with scratch.open("wb") as file:
            file.write(bytes(HEADER))
            for name, part in parts.items():
                start, checksum = file.tell(), 0
                for array in part():
                    content = np.ascontiguousarray(array).data
                    checksum = zlib.crc32(content, checksum)
                    file.write(content)
                sections[name] = {"offset": start, "bytes": file.tell() - start, "crc32": checksum}
                file.write(bytes(-file.tell() % 64))
            text = json.dumps({"byte_order": "little", **described, "size": file.tell(), "sections": sections}).encode()
            file.seek(0)
            file.write(FIXED.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); free some space or choose another") from None
    finally:
        scratch.unlink(missing_ok=True)


def open_shard(path: Path, fingerprint: str) -> Shard:
    """Maps the file; raises where it is cut, torn, of another version or of another tokenizer."""
    arrays, described = map_sections(path, fingerprint, lambda described: SHARD_TYPES | {
        "tokens": f"<u{described['width']}"
    })  # fmt: skip
    return Shard(path, arrays["tokens"], arrays["suffixes"], arrays["starts"], described["documents"])


def map_sections(
    path: Path, fingerprint: str, types: Callable[[dict[str, Any]], dict[str, str]]
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays of a file, mapped, and its description; their types may depend on what it says."""
    described = _description(path)
    if sys.byteorder != described["byte_order"]:
        raise InputError(f"{path}: written for another byte order; {REBUILD} on this machine")
    if described["fingerprint"] != fingerprint:
        raise InputError(f"{path}: a shard of another tokenizer than its store; {REBUILD}")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if set(wanted := types(described)) != set(described["sections"]):
        raise InputError(f"{path}: a file of another kind than its name says; {REBUILD}")
    arrays = {}
    for name, kind in wanted.items():
        section, entry = described["sections"][name], np.dtype(kind)
        arrays[name] = np.frombuffer(mapped, entry, section["bytes"] // entry.itemsize, section["offset"])
    return arrays, described


def check_shard(path: Path) -> None:
    """Reads the whole file and raises where an array is not what was written."""
    described = _description(path)
    with path.open("rb") as file:
        for name, section in described["sections"].items():
            checksum = 0
            file.seek(section["offset"])
            for left in range(section["bytes"], 0, -BLOCK):
                checksum = zlib.crc32(file.read(min(left, BLOCK)), checksum)
            if checksum != section["crc32"]:
                raise InputError(f"{path}: the {name} are damaged; {REBUILD}")


def _description(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            head, size = file.read(HEADER), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {REBUILD}") from None
    if len(head) < FIXED.size or head[:8] != MAGIC:
        raise InputError(f"{path}: not a shard of a store, or cut short; {REBUILD}")
    _, version, length, checksum = FIXED.unpack_from(head)
    if version != VERSION:
        raise InputError(f"{path}: a shard of format version {version}, this is version {VERSION}; {REBUILD}")
    text = head[FIXED.size : FIXED.size + length]
    if zlib.crc32(text) != checksum:
        raise InputError(f"{path}: its header is damaged; {REBUILD}")
    described: dict[str, Any] = json.loads(text)
    if size != described["size"]:
        raise InputError(f"{path}: has {size:,} bytes and should have {described['size']:,}; {REBUILD}")
    return described
