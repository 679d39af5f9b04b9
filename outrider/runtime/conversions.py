"""Graphs made from models, kept in the user's cache: made once, checked against the model, complete or not there.

The key names the weights, everything in the configuration, the form of the weights and the versions that made it. A new
graph replaces those of the same model: of other weights, or made by earlier versions.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from rich.progress import Progress

from outrider.models.convert import check_space, is_complete, kept
from outrider.models.known import digest as digest
from outrider.models.known import kind_of as kind_of
from outrider.models.load import fingerprint
from outrider.runtime.progress import told_if_slow
from outrider.runtime.targets import openvino_target
from outrider.runtime.weights import bits

log = logging.getLogger("outrider")
ORIGIN = "origin.json"  # beside a graph: which model in which form, and the versions that made it


def openvino_graph(model: Any, precision: str, keep: bool = True) -> Any:
    """The `openvino.Model` of `model` in this precision; from the cache where `keep` allows. Changes the cache."""
    import openvino as ov

    from outrider.runtime.openvino.convert import FORMAT, GRAPH, PRECISIONS

    form = PRECISIONS[precision].form
    if not keep:
        return _make(model, precision)
    versions = [str(FORMAT), version("openvino"), version("transformers")]
    name = f"{type(model).__name__}-{form}-{digest([identity_of(model), form, versions])}"
    origin = {"model": [str(model.name_or_path), *kind_of(model), form], "versions": versions}

    def fill(folder: Path, _: Path, progress: Progress) -> str:
        task = progress.add_task("converting for OpenVINO", total=None)
        size = sum(weight.numel() for weight in model.parameters()) * _numbers(form)[0] // 8  # int8: 8 bits
        check_space(folder, size, f"converting {type(model).__name__} for OpenVINO ({precision})")
        ov.save_model(_make(model, precision), folder / GRAPH, compress_to_fp16=False)
        (folder / ORIGIN).write_text(json.dumps(origin))
        progress.remove_task(task)
        return type(model).__name__

    folder = user_cache_path("outrider") / "openvino" / name
    new = not is_complete(folder)
    with told_if_slow(f"converting {type(model).__name__} for OpenVINO ({precision}); done once and kept"):
        path = kept(folder, fill) / GRAPH
    if new and model.name_or_path:
        _drop_replaced(folder)
    try:
        return ov.Core().read_model(path)
    except RuntimeError as error:  # right sizes, wrong bytes; or another process has replaced it just now
        log.warning("the converted model %s cannot be read and is made again: %s", folder, str(error).splitlines()[0])
        path.unlink(missing_ok=True)
        return ov.Core().read_model(kept(folder, fill) / GRAPH)


def _make(model: Any, precision: str) -> Any:
    """Traced, checked in float32 against the model itself, then compressed."""
    from outrider.runtime.openvino.convert import PRECISIONS, compressed, trace
    from outrider.runtime.probe import probe

    graph = trace(model, probe(model))
    openvino_target(model, graph, max_slots=2, max_context=32, max_rows=8, self_test=True)
    return compressed(graph, PRECISIONS[precision])


def _drop_replaced(folder: Path) -> None:
    """Changes the cache: other graphs of the model of this one leave it, unless later versions made them.

    Who has one open goes on with it: it is moved away first, which fails as a whole where open files cannot move.
    """
    fresh = json.loads((folder / ORIGIN).read_text())
    for other in folder.parent.glob(f"*/{ORIGIN}"):
        try:
            kept = json.loads(other.read_text())
            later = any(_numbers(a) > _numbers(b) for a, b in zip(kept["versions"], fresh["versions"], strict=True))
            if other.parent != folder and kept["model"] == fresh["model"] and not later:
                away = folder.parent / f"{other.parent.name}.partial-replaced"
                os.replace(other.parent, away)
                shutil.rmtree(away, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("the converted model %s stays: %s", other.parent, error)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def identity_of(model: Any) -> list[str]:
    """Weights and configuration: what decides the model's output. Reads all weights."""
    return [fingerprint(model), *kind_of(model), digest([bits(p) for p in model.parameters()])]
