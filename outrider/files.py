"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outrider.errors import InputError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces the file in one move; a failure leaves the old one."""
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(scratch, 0o666 & ~_umask())
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def check_writable(path: Path) -> None:
    """Refuse a place where `write_atomic` would fail, before work is done that would be lost."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
