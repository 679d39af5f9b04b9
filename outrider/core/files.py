"""Writing files atomically: a file is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outrider.core.errors import InputError


def check_place(path: Path, name: str) -> None:
    """Refuses, before work is done for it, a file that could not be written there. `name` is what the caller gave."""
    if path.is_dir():
        raise InputError(f"{name}: is a folder; give a file name in it")
    if not path.parent.is_dir():
        raise InputError(f"{name}: the folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_file():
        raise InputError(f"{name}: is a device or a pipe; give the name of a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise InputError(f"{name}: cannot be written ({error.strerror}); choose another file") from None


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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
