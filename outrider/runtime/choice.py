"""Runtimes by name: what can run a target model, on which devices and in which precisions, and which one is taken.

"auto" takes the first of `AUTO` that runs this model on this device; *measured* ones are compared with each other and
with the next that is not, in a short trial that is remembered. A runtime asked for by name runs or is refused with the
remedy.
Adding one is a row of `RUNTIMES`.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from outrider.core.errors import InputError, MissingExtra, OutriderError, UnknownName, UnsupportedModel, did_you_mean
from outrider.core.protocols import Target
from outrider.models.loaded import LoadedModel, Origin
from outrider.models.quiet import first_line
from outrider.runtime.progress import told_if_compiling, told_if_slow
from outrider.runtime.targets import (
    cuda_target,
    eager_target,
    kept_target,
    native_target,
    openvino_target,
    pack_target,
)

log = logging.getLogger("outrider")
AUTO_NAME = "auto"
NATIVE = "native"
PROCESSORS = ("x86_64", "amd64", "arm64", "aarch64")  # that native has kernels for
GRAPHS = "graphs"
AUTO = (GRAPHS, "openvino", "native", "eager")  # what "auto" may take, best first; the last runs everything
_made: WeakKeyDictionary[Any, dict[str, tuple[list[str], Any]]] = WeakKeyDictionary()  # see _draft_graph
ROUNDED, QUANTISED_BITS = "int8", 12.0  # bits a weight of a file; those of half precision have 16
WORTH_A_TRIAL = 1 << 25  # parameters; a smaller model runs before a conversion and a trial would be done


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    summary: str
    precisions: tuple[str, ...]  # the first is the default; empty: the precision is the model's dtype
    obstacle: Callable[[torch.device, str], str]  # why it cannot run there in that precision, and the remedy; or ""
    build: Callable[[Any, str, bool, Mapping[str, Any]], Target]  # model, precision, whether to keep what was made
    measured: bool = False  # "auto" takes it only where a trial says that it is the fastest

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
    if runtime == AUTO_NAME:
        return _automatic(model, precision, keep, limits)
    chosen = RUNTIMES[runtime]
    return chosen.build(model, precision or chosen.precision, keep, limits)


def build_loaded(loaded: LoadedModel, runtime: str = AUTO_NAME, precision: str | None = None, **limits: Any) -> Target:
    """`build`, without the model in memory where an earlier start has kept what a runtime needs of it.

    Changes the cache: weights that a runtime reads in a form of its own are packed once, from the model's files, and
    mapped into memory from there.
    """
    if loaded.origin is None:
        return build(loaded.model, runtime, precision, **limits)
    check(runtime, precision, loaded.device)
    chosen = RUNTIMES.get(runtime) or _likely(loaded.origin, loaded.device, precision)
    if chosen.name == NATIVE:
        form = precision or chosen.precision
        made = kept_target(loaded.origin, form, limits) or pack_target(loaded.origin, form, loaded.name, limits)
        if made is not None:
            return made
    return build(loaded.model, runtime, precision, **limits)


def _likely(origin: Origin, device: torch.device, precision: str | None) -> Runtime:
    """What a trial of this kind of model has found to be the fastest; else native, where it may run the model: it needs
    neither a conversion nor the model's float32 weights."""
    from outrider.runtime.trial import remembered_of

    able = _able(device, precision, origin.parameters)
    names = [runtime.name for runtime in able]
    seconds = remembered_of(origin.kind, "torch.float32", names, precision)
    if seconds and all(runtime.measured for runtime in able[:-1]):
        return RUNTIMES[min(seconds, key=lambda name: seconds[name])]
    return next((runtime for runtime in able if runtime.name == NATIVE), able[0])


def _able(device: torch.device, precision: str | None, parameters: int) -> list[Runtime]:
    """What "auto" may take of a model of this size, best first."""
    small = precision is None and parameters < WORTH_A_TRIAL
    owners = _owners(precision)
    return [
        runtime for runtime in owners
        if not runtime.obstacle(device, precision or runtime.precision) and not (runtime.measured and small)
    ] or owners[-1:]  # fmt: skip


def _automatic(model: Any, precision: str | None, keep: bool, limits: Mapping[str, Any]) -> Target:
    """The first that needs no trial, or the fastest of it and the measured ones before it."""
    able = _able(model.device, precision, sum(p.numel() for p in model.parameters()))
    group: list[Runtime] = []
    for runtime in able[:-1]:
        group.append(runtime)
        if not runtime.measured:
            try:
                return _fastest(model, group, precision, keep, limits)
            except OutriderError:  # which was said
                group = []
    if group:
        return _fastest(model, [*group, able[-1]], precision, keep, limits)
    return able[-1].build(model, precision or able[-1].precision, keep, limits)


def _fastest(
    model: Any, contenders: Sequence[Runtime], precision: str | None, keep: bool, limits: Mapping[str, Any]
) -> Target:
    """Raises where none runs it; each that does not is named in one line."""
    from outrider.runtime.trial import compared, remembered

    refused: list[OutriderError] = []

    def started(names: Sequence[str]) -> dict[str, Target]:
        made = {}
        for name in names:
            try:
                made[name] = RUNTIMES[name].build(model, precision or RUNTIMES[name].precision, keep, limits)
            except OutriderError as error:
                log.warning("runtime %s is left out: %s", name, error)
                refused.append(error)
        return made

    names = [runtime.name for runtime in contenders]
    seconds = remembered(model, names, precision) if len(names) > 1 else {}
    made = started([name for name in names if name not in seconds])  # those that could not run the last time, too
    if seconds and not made:
        best = min(seconds, key=lambda name: seconds[name])
        if made := started([best]):
            return made[best]
    made |= started([name for name in seconds if name not in made])
    if not made:
        raise refused[0]
    return made[compared(model, names, made, precision) if len(made) > 1 else next(iter(made))]


def build_draft(model: Any, target: Target, **limits: Any) -> Target:
    """A draft model in the runtime and precision of its target, or in the one that runs everything."""
    runtime = target.traits.runtime or AUTO[-1]
    limits.pop("bits", None)
    free = {"bits": "any"} if runtime == GRAPHS else {}  # only the target's rows must keep their bits
    try:
        return build(model, runtime, target.traits.precision, keep=False, **limits, **free)
    except OutriderError as error:
        if runtime == AUTO[-1]:
            raise
        log.warning("the draft model runs by %s instead of %s: %s", AUTO[-1], runtime, error)
        return build(model, AUTO[-1], keep=False, **limits)


def ran(target: Target, model: Any) -> dict[str, str]:
    """What reports say of a run: the runtime's name, and the precision of its weights, which may not be the model's."""
    dtype = str(model.dtype).removeprefix("torch.")
    traits = target.traits
    return {"runtime": traits.runtime or type(target).__name__, "precision": traits.precision or dtype}


def nearest_precision(source: Any, loaded: LoadedModel, runtime: str) -> str | None:
    """For a GGUF file of quantised weights the precision nearest to theirs, which is said; None for other models.

    Small models stay as they are: they run before rounding would pay.
    """
    if runtime != AUTO_NAME or loaded.origin is None or loaded.origin.parameters < WORTH_A_TRIAL:
        return None
    if RUNTIMES[NATIVE].obstacle(loaded.device, ROUNDED) or not (bits := _bits(source, loaded)) < QUANTISED_BITS:
        return None
    log.warning(
        "%s has %.1f bits a weight and runs in %s, the nearest precision; --precision float32 keeps every bit",
        Path(source).name, bits, ROUNDED,
    )  # fmt: skip
    return ROUNDED


def _bits(source: Any, loaded: LoadedModel) -> float:
    """A weight of a GGUF file has so many; infinite for what is none."""
    if not isinstance(source, str | PathLike) or Path(source).suffix != ".gguf":
        return float("inf")
    return 8 * Path(source).expanduser().stat().st_size / _parameters(loaded)


def advise(source: Any, target: Target, loaded: LoadedModel) -> None:
    """Say how a GGUF file of quantised weights that runs in float32 would run several times as fast."""
    chosen = RUNTIMES.get(target.traits.runtime)
    if chosen is None or ROUNDED not in chosen.precisions or target.traits.precision != "float32":
        return
    if (bits := _bits(source, loaded)) < QUANTISED_BITS:
        log.warning(
            "%s has %.1f bits a weight and runs in float32; with --precision %s (in Python precision=%r) it runs about "
            "three times as fast", Path(source).name, bits, ROUNDED, ROUNDED,
        )  # fmt: skip


def _parameters(loaded: LoadedModel) -> int:
    known = loaded.origin
    return known.parameters if known else sum(weight.numel() for weight in loaded.model.parameters())


def check(runtime: str, precision: str | None, device: torch.device | None = None) -> None:
    """Raise for a name, a precision or a device that cannot be; without a device for what no device can mend."""
    named = list(RUNTIMES.values()) if runtime == AUTO_NAME else [find(runtime)]
    if precision is not None and not any(precision in r.precisions for r in named):
        known = "; ".join(f"{r.name} has {', '.join(r.precisions)}" for r in RUNTIMES.values() if r.precisions)
        hint = did_you_mean(precision, [p for r in named for p in r.precisions])
        raise InputError(
            f"no precision {precision!r} in the runtime {runtime}: {hint}{known}; other runtimes follow --dtype"
        )
    if device is None or (runtime == AUTO_NAME and precision is None):
        return
    owners = _owners(precision) if runtime == AUTO_NAME else named
    reasons = [entry.obstacle(device, precision or entry.precision) for entry in owners]
    if all(reasons):
        raise MissingExtra(reasons[0]) if "pip install" in reasons[0] else InputError(reasons[0])


def _owners(precision: str | None) -> list[Runtime]:
    """What "auto" may take: with a precision those that have it."""
    usual = [RUNTIMES[name] for name in AUTO]
    if precision is None:
        return usual
    having = [r for r in usual if precision in r.precisions]
    return having or [r for r in RUNTIMES.values() if precision in r.precisions]


def find(name: str) -> Runtime:
    if name not in RUNTIMES:
        known = [AUTO_NAME, *RUNTIMES]
        raise UnknownName(f"no runtime {name!r}; {did_you_mean(name, known)}known: {', '.join(known)}")
    return RUNTIMES[name]


def _eager(model: Any, _: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    return eager_target(model, **limits)


def _openvino(model: Any, precision: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    from outrider.runtime.conversions import openvino_graph

    try:
        graph = openvino_graph(model, precision) if keep else _draft_graph(model, precision)
        return openvino_target(model, graph, precision=precision, self_test=False, **limits)
    except ImportError as error:
        why = f"the package openvino is there but cannot be imported ({error})"
        raise MissingExtra(f"{why}; run: pip install --force-reinstall openvino, or use runtime eager") from error
    except (RuntimeError, OSError) as error:
        raise UnsupportedModel(f"OpenVINO cannot run it here ({first_line(error)}); use runtime eager") from error


def _draft_graph(model: Any, precision: str) -> Any:
    """Of a model that no cache keeps: made once while it lives and its weights stay as they are, as it takes seconds.

    Methods are made often, from the same draft; one that goes on learning changes its weights in place.
    """
    from outrider.runtime.conversions import identity_of, openvino_graph

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
    from outrider.runtime import packed
    from outrider.runtime.native.model import BITS

    size, free = sum(w.numel() for w in model.parameters()) * BITS[precision] // 8, packed.available()
    if size > free // 2:
        why = f"native holds the weights once more: {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise UnsupportedModel(f"{why}; use openvino or eager")
    checking = "packing the weights for the runtime native and checking its steps against the model"
    with told_if_slow(checking, after=5), told_if_compiling("the steps of the runtime native"):
        return native_target(model, precision=precision, **limits)


def _native_obstacle(device: torch.device, _: str) -> str:
    if device.type != "cpu":
        return f"the runtime native runs on the CPU, not on {device}; use --device cpu or runtime eager"
    kind = platform.machine()
    if kind.lower() not in PROCESSORS:
        return f"the runtime native has kernels for x86-64 and ARM64 processors, not for {kind}; use runtime eager"
    return ""


def _graphs(model: Any, _: str, keep: bool, limits: Mapping[str, Any]) -> Target:
    return cuda_target(model, **limits)


def _no_cuda(device: torch.device, _: str) -> str:
    where = f"the runtime graphs needs a CUDA GPU and the model is on {device.type}"
    return "" if device.type == "cuda" else f"{where}; load it with device cuda, or use the runtime eager"


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            GRAPHS, "transformers on CUDA, a whole step as one graph of fused kernels; rows have the same bits in "
            "any step on GPUs of compute capability 9.0, as tried at load", (), _no_cuda, _graphs,
        ),
        Runtime(
            "openvino", "OpenVINO graphs on the CPU, float32 or with int8 and int4 weights; rows have the same bits in "
            "any step where the processor's products do (AVX-512), which is tried at load",
            ("float32", "int8", "int4", "int8-weights", "int4-weights"), _openvino_obstacle, _openvino, measured=True,
        ),
        Runtime(
            "native", "Llama-like models on the CPU, a whole step as one compiled call; int8 and int4 weights; rows "
            "have the same bits in any step",
            ("float32", "int8", "int4"), _native_obstacle, _native, measured=True,
        ),
        Runtime("eager", "transformers on PyTorch, layer by layer: all models and devices", (), lambda *_: "", _eager),
    )
}  # fmt: skip
