"""Targets by runtime: one builder each, for those who know which one they want. `choice` finds the best by itself.

What a builder takes besides its own options are the limits of `SlotTarget`: max_slots, max_context, cache_bytes,
max_rows, prompt_rows, self_test. Packages that a runtime needs are imported when it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from outrider.core.errors import UnsupportedModel
from outrider.models.files.phases import phase
from outrider.models.loaded import Origin
from outrider.runtime.slots import SlotTarget

log = logging.getLogger("outrider")


def eager_target(model: Any, *, recorded: bool = False, **limits: Any) -> SlotTarget:
    """Any causal language model that transformers loads, layer by layer.

    `recorded`: on a GPU passes of a model with recurrent layers are recorded as CUDA graphs. Proved with operations
    traced on a CPU, not yet on a GPU; so it must be asked for.
    """
    from outrider.runtime.eager.backend import EagerBackend
    from outrider.runtime.recurrent.recorded import recorder

    return SlotTarget(EagerBackend(model, recorder(model.device) if recorded else None), **limits)


def cuda_target(
    model: Any, *, fuse: bool = True, capture: bool | None = None, graph_bytes: int = 4 << 30, warm_up: bool = True,
    bits: str = "same", ops: Any = None, **limits: Any,
) -> SlotTarget:  # fmt: skip
    """The same with whole steps as CUDA graphs; for the options see `CudaBackend`."""
    from outrider.runtime.cuda.backend import CudaBackend

    options: dict[str, Any] = {
        "fuse": fuse,
        "capture": capture,
        "graph_bytes": graph_bytes,
        "warm_up": warm_up,
        "bits": bits,
    }
    return SlotTarget(CudaBackend(model, ops=ops, **options), **limits)


def openvino_target(
    model: Any, graph: Any, *, precision: str = "float32", profile: bool = False, **limits: Any
) -> SlotTarget:
    """A graph that was made of `model` by `conversions.openvino_graph`, on the CPU."""
    from outrider.runtime.openvino.backend import OpenVINOBackend

    return SlotTarget(OpenVINOBackend(model, graph, precision=precision, profile=profile), **limits)


def native_target(model: Any, *, precision: str = "float32", **limits: Any) -> SlotTarget:
    """A Llama-like model in compiled code on the CPU."""
    from outrider.runtime.native.backend import NativeBackend

    return SlotTarget(NativeBackend(model, precision=precision), **limits)


def kept_target(origin: Origin, precision: str, limits: Mapping[str, Any]) -> SlotTarget | None:
    """The same from weights that `keep_target` left on disk, without the model; None where there are none."""
    from outrider.runtime.native import held
    from outrider.runtime.native.backend import NativeBackend

    with phase("map"):
        found = held.read(held.place(origin.identity, precision))
        return None if found is None else SlotTarget(NativeBackend(None, precision=precision, held=found), **limits)


def pack_target(origin: Origin, precision: str, name: str, limits: Mapping[str, Any]) -> SlotTarget | None:
    """Changes the cache: packs the weights from the model's files, checks them, and maps them; None where the native
    step does not run this model, or its files cannot be read tensor by tensor."""
    from outrider.runtime.native import held

    if (skeleton := origin.skeleton()) is None:
        return None
    from outrider.runtime.native.packing import pack_files

    about = {"model": name, "precision": precision}
    try:
        pack_files(held.place(origin.identity, precision), skeleton, precision, about)
    except UnsupportedModel as error:
        log.info("the weights are not packed from the files: %s", error)
        return None
    return kept_target(origin, precision, limits)
