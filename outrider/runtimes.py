"""Runtimes by name: what can run a target model, on which devices and in which precisions, and which one is taken.

"auto" takes the first of `AUTO` that runs this model on this device, a *measured* one only where a short trial says
that it is faster than the last, which runs everything. A runtime asked for by name runs or is refused with the remedy.
Adding one is a row of `RUNTIMES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch

from outrider.errors import InputError, MissingExtra, OutriderError, UnknownName, UnsupportedModel
from outrider.models.quiet import first_line
from outrider.protocols import Target
from outrider.target.eager import TransformersTarget

log = logging.getLogger("outrider")
AUTO_NAME = "auto"
AUTO = ("graphs", "openvino", "eager")  # what "auto" may take, best first; the last runs everything
_made: WeakKeyDictionary[Any, dict[str, tuple[list[str], Any]]] = WeakKeyDictionary()  # see _draft_graph
WORTH_A_TRIAL = 1 << 25  # parameters; a smaller model runs before a conversion and a trial would be done


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    summary: str
    precisions: tuple[str, ...]  # the first is the default; empty: the precision is the model's dtype
    obstacle: Callable[[torch.device, str], str]  # why it cannot run there in that precision, and the remedy; or ""
    build: Callable[[Any, str, bool, Mapping[str, Any]], Target]  # model, precision, whether to keep what was made
    measured: bool = False  # "auto" takes it only where a trial says that it is faster

    @property
    def precision(self) -> str:
        return self.precisions[0] if self.precisions else ""


def build(
    model: Any, runtime: str = AUTO_NAME, precision: str | None = None, *, keep: bool = True, **limits: Any
) -> Target:
    """A target that runs `model`; `limits` are max_slots, max_context and cache_bytes.

    `keep` lets a runtime store what it made of the model in the user's cache; not worth it for short-lived models.
    """
    check(runtime, precision, model.device)
    runtime = _owner(runtime, precision)
    if runtime != AUTO_NAME:
        chosen = RUNTIMES[runtime]
        return chosen.build(model, precision or chosen.precision, keep, limits)
    last = RUNTIMES[AUTO[-1]]
    for name in AUTO[:-1]:
        candidate = RUNTIMES[name]
        small = sum(p.numel() for p in model.parameters()) < WORTH_A_TRIAL
        if candidate.obstacle(model.device, candidate.precision) or (candidate.measured and small):
            continue
        try:
            made = candidate.build(model, candidate.precision, keep, limits)
        except OutriderError as error:
            log.warning("runtime %s is left out: %s", name, error)
            continue
        if not candidate.measured or _is_faster(model, candidate, made, last, limits):
            return made
    return last.build(model, last.precision, keep, limits)


def build_draft(model: Any, target: Target, **limits: Any) -> Target:
    """A draft model in the runtime and precision of its target, or in the one that runs everything."""
    runtime = getattr(target, "runtime", AUTO[-1])
    try:
        return build(model, runtime, getattr(target, "precision", None), keep=False, **limits)
    except OutriderError as error:
        if runtime == AUTO[-1]:
            raise
        log.warning("the draft model runs by %s instead of %s: %s", AUTO[-1], runtime, error)
        return build(model, AUTO[-1], keep=False, **limits)


def check(runtime: str, precision: str | None, device: torch.device | None = None) -> None:
    """Raise for a name, a precision or a device that cannot be; without a device for what no device can mend."""
    chosen = list(RUNTIMES.values()) if runtime == AUTO_NAME else [find(runtime)]
    if precision is not None and not any(precision in r.precisions for r in chosen):
        owners = "; ".join(f"{r.name} has {', '.join(r.precisions)}" for r in RUNTIMES.values() if r.precisions)
        raise InputError(
            f"no precision {precision!r} in the runtime {runtime}: {owners}; other runtimes follow --dtype"
        )
    runtime = _owner(runtime, precision)
    if runtime != AUTO_NAME and device is not None:
        own = RUNTIMES[runtime]
        why = own.obstacle(device, precision or own.precision)
        if why:
            raise MissingExtra(why) if "pip install" in why else InputError(why)


def _owner(runtime: str, precision: str | None) -> str:
    """The runtime to take: a precision asks for the one that has it."""
    if runtime != AUTO_NAME or precision is None:
        return runtime
    return next(r.name for r in RUNTIMES.values() if precision in r.precisions)


def find(name: str) -> Runtime:
    if name not in RUNTIMES:
        raise UnknownName(f"no runtime {name!r}; known: {', '.join([AUTO_NAME, *RUNTIMES])}")
    return RUNTIMES[name]


def _is_faster(
    model: Any, candidate: Runtime, made: Target, last: Runtime, limits: Mapping[str, Any]
) -> bool:  # fmt: skip
    from outrider.trial import faster

    one = {**limits, "max_slots": 1, "max_context": 256}
    return faster(model, candidate.name, made, last.name, lambda: last.build(model, last.precision, False, one))


def _eager(model: Any, _: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    return TransformersTarget(model, **limits)


def _openvino(model: Any, precision: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    from outrider.conversions import openvino_graph
    from outrider.target.openvino import OpenVINOTarget

    try:
        graph = openvino_graph(model, precision) if keep else _draft_graph(model, precision)
        return OpenVINOTarget(model, graph, precision=precision, self_test=False, **limits)
    except ImportError as error:
        why = f"the package openvino is there but cannot be imported ({error})"
        raise MissingExtra(f"{why}; run: pip install --force-reinstall openvino, or use runtime eager") from error
    except (RuntimeError, OSError) as error:
        raise UnsupportedModel(f"OpenVINO cannot run it here ({first_line(error)}); use runtime eager") from error


def _draft_graph(model: Any, precision: str) -> Any:
    """Of a model that no cache keeps: made once while it lives and its weights stay as they are, as it takes seconds.

    Methods are made often, from the same draft; one that goes on learning changes its weights in place.
    """
    from outrider.conversions import identity_of, openvino_graph

    identity, known = identity_of(model), _made.setdefault(model, {})
    if precision not in known or known[precision][0] != identity:
        known[precision] = identity, openvino_graph(model, precision, keep=False)
    return known[precision][1]


def _openvino_obstacle(device: torch.device, precision: str) -> str:
    missing = [p for p in (["openvino"] if precision == "float32" else ["openvino", "nncf"]) if find_spec(p) is None]
    if missing:
        what = "the runtime openvino" if "openvino" in missing else f"precision {precision}"
        return f"{what} needs the package {missing[0]}; run: pip install 'outrider[openvino]'"
    if device.type != "cpu":
        return f"the runtime openvino runs on the CPU, not on {device}; use --device cpu or runtime eager"
    return ""


def _native(model: Any, precision: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    from outrider.recipes.common import told_if_slow
    from outrider.target.native import NativeTarget

    with told_if_slow("compiling the steps of the runtime native for this machine; this happens once", after=10):
        return NativeTarget(model, precision=precision, **limits)


def _native_obstacle(device: torch.device, _: str) -> str:
    where = f"the runtime native runs on the CPU, not on {device}"
    return "" if device.type == "cpu" else f"{where}; use --device cpu or runtime eager"


def _graphs(model: Any, _: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    from outrider.target.graphed import GraphedTarget

    return GraphedTarget(model, **limits)


def _no_cuda(device: torch.device, _: str) -> str:
    where = f"the runtime graphs needs a CUDA GPU and the model is on {device.type}"
    return "" if device.type == "cuda" else f"{where}; load it with device cuda, or use the runtime eager"


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("graphs", "transformers on CUDA, a whole step as one graph of fused kernels", (), _no_cuda, _graphs),
        Runtime(
            "openvino", "OpenVINO graphs on the CPU, float32 or with int8 and int4 weights",
            ("float32", "int8", "int4", "int8-weights", "int4-weights"), _openvino_obstacle, _openvino, measured=True,
        ),
        Runtime(
            "native", "Llama-like models on the CPU, a whole step as one compiled call; int8 and int4 weights",
            ("float32", "int8", "int4"), _native_obstacle, _native,
        ),
        Runtime("eager", "transformers on PyTorch, layer by layer: all models and devices", (), lambda *_: "", _eager),
    )
}  # fmt: skip
