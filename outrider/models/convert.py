"""GGUF to safetensors, once: a GGUF file becomes a dense float32 `transformers` folder in the user's cache.

Float32 because it holds the dequantised values exactly, which neither half precision does. The price is disk: four
bytes a parameter, which must be free. A folder appears under its final name only when complete, and one process
converts while others wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from outrider.core.errors import InputError, MissingExtra
from outrider.models.gguf_file import check_whole
from outrider.models.quiet import first_line, quiet_transformers

logger = logging.getLogger(__name__)

SEAL = "outrider.json"  # written last: names every file of a complete folder and its size
FORMAT = 1  # raised when folders of an earlier form must be made again


def cache_folder() -> Path:
    """Where converted models live: the platform's cache folder for this user (XDG_CACHE_HOME on Linux)."""
    return user_cache_path("outrider") / "models"


def folder_for(gguf: Path, cache: Path | None = None) -> str:
    """The cache name of a user's file, by its content: a copy, or a file under another name, is not converted again."""
    cache = cache or cache_folder()
    key = checksum(gguf, cache)[:12]
    made = sorted(folder.name for folder in cache.glob(f"*-{key}") if is_complete(folder))
    return made[0] if made else f"{gguf.stem}-{key}"


def checksum(file: Path, cache: Path) -> str:
    """Of all its bytes. Kept in the cache, so that a file that stays where and as it is, is not read again."""
    stat = file.stat()
    place = hashlib.sha256(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()
    known = cache / f"{place[:24]}.sha256"
    with suppress(OSError, ValueError):
        if len(bytes.fromhex(found := known.read_text())) == hashlib.sha256().digest_size:
            return found
    with file.open("rb") as content:
        made = hashlib.file_digest(content, "sha256").hexdigest()
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        known.write_text(made)
    return made


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raises `InputError` where the disk of a cache folder, which exists, has not so many bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        room = f"{what} takes {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free"
        raise InputError(f"{room}; free space there, or set XDG_CACHE_HOME to a folder on another disk")


def check_memory(needed: int, what: str) -> None:
    """Raises `InputError` where this machine cannot have so many bytes in memory, before anything is read."""
    if needed > (free := free_memory()):
        room = f"{what} takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are to be had"
        raise InputError(f"{room}; use a smaller model or precision (--precision int8), or close other programs")


def free_memory() -> int:
    """Bytes that can be had, what the system keeps of files among them; plenty where it does not say."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62


def is_complete(folder: Path) -> bool:
    """Every file that the seal names is there with its size."""
    try:
        seal = json.loads((folder / SEAL).read_text())
        return seal["format"] == FORMAT and all((folder / f).stat().st_size == n for f, n in seal["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def converted(name: str, find: Callable[[Path, Progress], Path], cache: Path | None = None) -> Path:
    """The complete folder `name` of the cache, made if need be from the file that `find(scratch, progress)` gives.

    Changes the cache. A folder that exists but is not complete is made again.
    """
    folder = (cache or cache_folder()) / name
    if is_complete(folder):
        return folder
    for package in ("gguf", "accelerate"):  # transformers' own GGUF reader asks for both
        if find_spec(package) is None:
            raise MissingExtra(f"reading a GGUF file needs the package {package}; run: pip install 'outrider[demo]'")

    def fill(dense: Path, scratch: Path, progress: Progress) -> str:
        gguf = find(scratch, progress)
        convert(gguf, dense, progress)
        return gguf.name

    return kept(folder, fill)


def kept(folder: Path, fill: Callable[[Path, Path, Progress], str]) -> Path:
    """The complete `folder`; where it is not, made by `fill(folder, scratch, progress)`, which names its source.

    Changes the cache. It appears under its name only when complete, and one process makes it while others wait.
    """
    if is_complete(folder):
        return folder
    cache = folder.parent
    with _writable(cache), _progress() as progress:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f"{folder.name}.lock", progress):
            if not is_complete(folder):  # another process may have made it meanwhile
                _make(folder, fill, progress)
    return folder


def _make(folder: Path, fill: Callable[[Path, Path, Progress], str], progress: Progress) -> None:
    if folder.exists():
        logger.warning("the cached model %s is incomplete and is made again", folder)
        shutil.rmtree(folder)
    for left in folder.parent.glob(f"{folder.name}.partial-*"):  # of a killed process: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        source = fill(made, Path(scratch), progress)
        sizes = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
        (made / SEAL).write_text(json.dumps({"format": FORMAT, "source": source, "files": sizes}, indent=1))
        os.replace(made, folder)


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write the dequantised model and its tokenizer. Neither atomic nor cached: see `converted`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    check_space(folder, 4 * check_whole(gguf).values, f"converting {gguf.name}")
    task = progress.add_task(f"reading {gguf.name}", total=None)
    with quiet_transformers(), _counted_tensors(progress, task):
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            # Without `dequantize` the weights would stay packed in a layout that only its own kernels read.
            packed = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, quantization_config=packed, dtype=torch.float32
            )
        except (ValueError, KeyError, NotImplementedError, OSError) as error:
            raise InputError(
                f"{gguf} cannot be read as a GGUF model ({first_line(error)}); convert it elsewhere"
            ) from error
        # A dequantised model still carries the quantisation config, and `save_pretrained` refuses while it does.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        if model.generation_config is not None and model.generation_config.eos_token_id is None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        progress.update(task, description=f"writing {gguf.stem}", total=None)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        progress.remove_task(task)


@contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """One process at a time; the lock of a killed process falls with it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        task = progress.add_task(f"waiting for another process ({path.stem})", total=None)
        lock.acquire()
        progress.remove_task(task)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writable(cache: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, InputError | MissingExtra):
            raise
        why = getattr(error, "strerror", None) or first_line(error)
        raise InputError(
            f"cannot write the model cache {cache} ({why}); free space there or set XDG_CACHE_HOME"
        ) from error


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


@contextmanager
def _counted_tensors(progress: Progress, task: TaskID) -> Iterator[None]:
    """Show the library's walk over the tensors, the long part, in our bar instead of its own."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def counted(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        progress.update(task, description="dequantising", total=len(tensors))
        for tensor in tensors:
            yield tensor
            progress.advance(task)

    with patch.object(reader, "tqdm", counted) if hasattr(reader, "tqdm") else nullcontext():
        yield
