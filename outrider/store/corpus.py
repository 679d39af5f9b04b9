"""A corpus on disk: which files are text, and their content in pieces that a reader can go on from.

A file is a document; in a .jsonl file every line is one, its `field` the text. Files that are not UTF-8 text are left
out and counted; hidden files and folders and links are passed by. Long documents come in pieces cut after a line, so
that neither reading nor tokenising needs memory for all of one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import InputError

LINES = (".jsonl", ".ndjson")
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Corpus:
    root: Path
    files: tuple[Path, ...]  # text, in an order that does not change
    sizes: tuple[int, ...]
    skipped: tuple[Path, ...]  # not text
    fingerprint: str  # of names, sizes and times of change

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str
    file: int
    after: int | None  # the byte where reading may go on; None inside a line of JSON
    ends: bool  # the document ends here
    bad: bool = False  # a line that is no JSON or has no text


def scan(root: Path, leave_out: Path | None = None) -> Corpus:
    """All text files of a folder, or the one file; reads everything once, to know what is text before any work."""
    if not root.exists():
        raise InputError(f"--corpus {root}: does not exist; give a folder or a text file")
    names = [root] if root.is_file() else sorted(_walk(root, leave_out))
    digest = hashlib.sha256()
    files, sizes, skipped = [], [], []
    for path in names:
        try:
            status = path.stat()
            text = _is_text(path)
        except OSError:
            text = False
        if not text:
            skipped.append(path)
        elif status.st_size:
            files.append(path)
            sizes.append(status.st_size)
            digest.update(
                f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace")
            )
    if not files:
        what = f"its {len(skipped):,} files are not UTF-8 text" if skipped else "there is no text in it"
        raise InputError(f"--corpus {root}: nothing to index, {what}; give text files in UTF-8")
    return Corpus(root, tuple(files), tuple(sizes), tuple(skipped), digest.hexdigest()[:16])


def pieces(corpus: Corpus, file: int, start: int, size: int, field: str) -> Iterator[TextPiece]:
    """The corpus from byte `start` of file number `file` on, in pieces of at most about `size` bytes."""
    for index in range(file, len(corpus.files)):
        read = _lines if corpus.files[index].suffix.lower() in LINES else _blocks
        try:
            yield from read(corpus.files[index], index, start, size, field)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{corpus.files[index]}: changed while it was read ({error}); start again") from error
        start = 0


def _walk(root: Path, leave_out: Path | None) -> Iterator[Path]:
    hidden = None if leave_out is None else leave_out.resolve()
    for folder, inner, names in os.walk(root):
        here = Path(folder)
        inner[:] = [name for name in inner if not name.startswith(".") and (here / name).resolve() != hidden]
        for name in names:
            path = here / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _is_text(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        try:
            while block := file.read(BLOCK):
                if b"\0" in block:
                    return False
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _blocks(path: Path, index: int, start: int, size: int, field: str) -> Iterator[TextPiece]:
    total = path.stat().st_size
    with path.open("rb") as file:
        while start < total:
            file.seek(start)
            block = file.read(size)
            if not block:
                raise InputError(f"{path}: changed while it was read; start again")
            if start + len(block) < total:
                block = block[: block.rfind(b"\n") + 1 or _whole(block)]
            start += len(block)
            yield TextPiece(block.decode("utf-8").removeprefix("\ufeff"), index, start, start == total)


def _whole(block: bytes) -> int:
    """Where the last character begins that may be cut in two; a character has at most four bytes."""
    end = len(block) - 1
    while end > 0 and block[end] & 0xC0 == 0x80:
        end -= 1
    return end or len(block)


def _lines(path: Path, index: int, start: int, size: int, field: str) -> Iterator[TextPiece]:
    with path.open("rb") as file:
        file.seek(start)
        for line in iter(file.readline, b""):
            after = file.tell()
            text = _text_of(line, field)
            if text is None:
                yield TextPiece("", index, after, ends=True, bad=bool(line.strip()))
                continue
            cuts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
            for cut in cuts[:-1]:
                yield TextPiece(cut, index, None, ends=False)
            yield TextPiece(cuts[-1], index, after, ends=True)


def _text_of(line: bytes, field: str) -> str | None:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    # JSON may spell half of a surrogate pair, which no tokenizer reads
    return text.encode("utf-8", "replace").decode("utf-8") if isinstance(text, str) else None
