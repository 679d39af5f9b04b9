"""Known models: what was found out about a model's files when they were first loaded, kept in the user's cache.

With it, and with weights that a runtime keeps in its very form, a model starts without `transformers`. An entry holds
for the very files (their sizes and times, or their content) and for the versions that wrote it, and is made again where
either has changed. Nothing here is needed: what cannot be read or written is passed over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from outrider._version import __version__
from outrider.models import embedded, quick_tokenizer
from outrider.models.convert import cache_folder, check_memory, checksum
from outrider.models.files.freed import give_back
from outrider.models.files.skeleton import Skeleton, of_folder, of_gguf
from outrider.models.load import (
    default_device,
    eos_ids,
    is_model,
    load_model,
    load_tokenizer,
    local_place,
    parse_device,
    parse_dtype,
)
from outrider.models.loaded import LoadedModel, Origin
from outrider.models.quick_tokenizer import QuickTokenizer

log = logging.getLogger("outrider")
FORMAT = 1
FACTS = "known.json"
VOLATILE = ("transformers_version", "dtype", "torch_dtype", "architectures")  # say nothing about what is computed
WEIGHTS = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt")  # what a model folder consists of


def known_folder() -> Path:
    return cache_folder().parent / "known"


def kind_of(model: Any) -> list[str]:
    """What decides the work of a forward, whatever the weights."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k not in VOLATILE}
    return [type(model).__name__, digest(config)]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def identity_of_files(source: object) -> str | None:
    """Of the files behind the name of a model; None where they are not all on this machine under one name."""
    text = str(source)
    versions = [FORMAT, __version__, version("transformers"), version("torch")]
    if text == embedded.NAME:
        return digest([embedded.SHA256, versions])
    path = Path(text).expanduser()
    with suppress(OSError):
        if path.suffix == ".gguf" and path.is_file():
            return digest([checksum(path, cache_folder()), versions])
        if text and (path / "config.json").is_file():
            files = [(f.name, f.stat()) for f in sorted(path.iterdir()) if f.suffix in WEIGHTS]
            stats = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
            return digest([str(path.resolve()), stats, versions])
    return None


def open_model(
    source: Any, *, tokenizer: Any = None, device: str | None = None, dtype: str | None = None,
    revision: str | None = None, trust_remote_code: bool = False,
) -> LoadedModel:  # fmt: skip
    """`load_model`, or without reading the weights where an earlier load has noted what there is to know.

    Changes the cache. Only models on the CPU in float32 are known, since others run by `transformers` anyway.
    """
    read = partial(
        load_model, source, tokenizer=tokenizer, device=device, dtype=dtype, revision=revision,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    usual = tokenizer is None and revision is None and not trust_remote_code and not is_model(source)
    at = default_device() if device is None else parse_device(device)
    if not usual or at.type != "cpu" or (dtype is not None and parse_dtype(dtype) != torch.float32):
        return read()
    identity = identity_of_files(source)
    if identity is None:
        return read()
    load, built = lambda: read().model, cache(partial(skeleton_of, source))
    if (known := _recall(identity, source, load, built)) is not None:
        return known
    loaded = _described(source, identity, load, built) or read()
    if loaded.origin is None:
        origin = Origin(identity, kind_of(loaded.model), parameters_of(loaded.model), load, built)
        loaded = replace(loaded, origin=origin)
    _note(identity, loaded)
    give_back()  # what reading a vocabulary and importing a library for it leaves behind
    return loaded


def skeleton_of(source: Any) -> Skeleton | None:
    """None where the model must be read as a whole, also where that would say what is wrong with it."""
    at = local_place(source)
    try:
        return None if at is None else of_gguf(at) if at.suffix == ".gguf" else of_folder(at)
    except Exception as error:
        log.info("%s is read as a whole: %s", source, error)
        return None


def _described(
    source: Any, identity: str, load: Callable[[], Any], built: Callable[[], Skeleton | None]
) -> LoadedModel | None:
    """The model without its weights, by its skeleton."""
    if (skeleton := built()) is None:
        return None
    model, tokenizer, unread = skeleton.model, skeleton.tokenizer, None
    name = source if str(source) == embedded.NAME else Path(source).expanduser().resolve()
    name = name if isinstance(name, str) else name.stem if name.suffix == ".gguf" else name.name
    size, made = parameters_of(model), cast("Any", unread)
    origin = Origin(identity, kind_of(model), size, _fitting(load, size, name), built)
    return LoadedModel(made, tokenizer, name, eos_ids(model, tokenizer), skeleton.fingerprint(), origin)


def _fitting(load: Callable[[], Any], parameters: int, name: str) -> Callable[[], Any]:
    """`load`, refused before anything is read where the memory is too small."""

    def read() -> Any:
        check_memory(4 * parameters, f"{name} in float32")
        return load()

    return read


def parameters_of(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _recall(
    identity: str, source: Any, load: Callable[[], Any], built: Callable[[], Skeleton | None]
) -> LoadedModel | None:
    folder = known_folder() / identity
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        names = facts["tokenizer"]
        tokenizer = None if names is None else QuickTokenizer(folder, names, lambda: load_tokenizer(source))
        size = int(facts["parameters"])
        origin = Origin(identity, list(facts["kind"]), size, _fitting(load, size, str(facts["name"])), built)
        unread: Any = None
        return LoadedModel(
            unread, tokenizer, str(facts["name"]), frozenset(map(int, facts["eos_ids"])), str(facts["fingerprint"]),
            origin,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    except Exception as error:  # a torn entry, or one of libraries that have changed: it is made again
        log.info("what was known of the model is passed over: %s", error)
        return None


def _note(identity: str, loaded: LoadedModel) -> None:
    """An entry for a model that is in memory, where its tokenizer can do without `transformers`."""
    folder = known_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{identity}.partial-", dir=folder) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            origin = loaded.origin
            assert origin is not None
            names = None if loaded.tokenizer is None else quick_tokenizer.note(loaded.tokenizer, made)
            if loaded.tokenizer is not None and names is None:
                return
            facts = {
                "name": loaded.name, "fingerprint": loaded.fingerprint, "eos_ids": sorted(loaded.eos_ids),
                "kind": origin.kind, "parameters": origin.parameters, "tokenizer": names, "outrider": __version__,
            }  # fmt: skip
            (made / FACTS).write_text(json.dumps(facts), encoding="utf-8")
            shutil.rmtree(folder / identity, ignore_errors=True)
            os.replace(made, folder / identity)
    except (OSError, ValueError, TypeError) as error:
        log.info("what is known of the model could not be kept: %s", error)
