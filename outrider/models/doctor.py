"""What is installed, what each missing part would enable, and which runtime would be used and why. Changes nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

import torch

from outrider._version import __version__
from outrider.models import embedded, hub
from outrider.models.convert import cache_folder
from outrider.models.files.cached import remembered, tried_bits
from outrider.models.load import default_device


class State(StrEnum):
    OK = "ok"
    NOTE = "note"  # absent, and nothing breaks without it
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    value: str  # what was found
    remedy: str = ""  # what to do, or what it would enable


EXTRAS = {  # package -> (extra, what it enables)
    "gguf": ("demo", "the embedded model and .gguf files"),
    "accelerate": ("demo", "the same: transformers' GGUF reader asks for it"),
    "matplotlib": ("bench", "plots in HTML reports"),
    "openvino": ("openvino", "the runtime openvino: the fastest on a CPU"),
    "nncf": ("openvino", "its int8 and int4 weights"),
}


X86 = ("x86_64", "amd64")
HOPPER = 9  # compute capability


def report(timeout: float = 3.0) -> list[Finding]:
    """Findings from the interpreter up to the runtime; waits at most about `timeout` seconds for the hub."""
    return [
        Finding("outrider", State.OK, __version__),
        Finding("python", State.OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _machine(),
        Finding("torch", State.OK, f"{torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"),
        _cuda(),
        Finding("transformers", State.OK, version("transformers")),
        *(_extra(package, extra, use) for package, (extra, use) in EXTRAS.items()),
        _cache(),
        _embedded(),
        *(Finding(f"known {name}", State.OK, what) for name, what in remembered()),
        *(Finding(f"bits of {model}", State.OK, what) for model, what in tried_bits()),
        _hub(timeout),
        _device(),
    ]


def _machine() -> Finding:
    """Which row of the page "where it runs" this is."""
    system, kind = platform.system(), platform.machine().lower()
    place = f"{system} on {'ARM64' if kind in ('arm64', 'aarch64') else 'x86-64' if kind in X86 else kind}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        fit = "graphs with kernels for it" if major >= HOPPER else "graphs with general kernels"
        return Finding("machine", State.OK, f"{place}, GPU of compute capability {major}.{minor}: {fit}")
    if torch.backends.mps.is_available():
        return Finding("machine", State.OK, f"{place}, MPS by --device mps: eager there; native on the CPU")
    return Finding("machine", State.OK, f"{place}: native on the CPU for models like Llama, else openvino or eager")


def _cuda() -> Finding:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("cuda", State.OK, f"{torch.version.cuda}: {names}")
    if torch.version.cuda is None:
        return Finding("cuda", State.NOTE, "this torch is a CPU build", "install a CUDA build of torch to use a GPU")
    return Finding("cuda", State.NOTE, "no usable GPU", "check the driver with nvidia-smi if there should be one")


def _extra(package: str, extra: str, use: str) -> Finding:
    try:
        return Finding(package, State.OK, f"{version(package)}: {use}")
    except PackageNotFoundError:
        return Finding(package, State.NOTE, "not installed", f"pip install 'outrider[{extra}]' enables {use}")


def _cache() -> Finding:
    folder = cache_folder()
    at = folder
    while not at.exists():
        at = at.parent
    if os.access(at, os.W_OK):
        return Finding("cache", State.OK, str(folder))
    return Finding("cache", State.PROBLEM, f"{folder} cannot be written", "set XDG_CACHE_HOME to a folder of yours")


def _embedded() -> Finding:
    name = f"model {embedded.NAME}"
    if embedded.is_cached():
        return Finding(name, State.OK, "converted and cached")
    return Finding(name, State.NOTE, "not cached yet", f"fetched and converted on the first load of {embedded.NAME!r}")


def _hub(timeout: float) -> Finding:
    if hub.reachable(timeout):
        return Finding("hub", State.OK, f"{hub.endpoint()} answers")
    remedy = "cached hub models, folders, .gguf files and the embedded model work without it"
    return Finding("hub", State.NOTE, f"{hub.endpoint()} does not answer", remedy)


def _device() -> Finding:
    device = default_device()
    why = "a GPU is present" if device.type == "cuda" else "no GPU is usable"
    dtype = "the checkpoint's dtype" if device.type == "cuda" else "float32"
    return Finding("device", State.OK, f"{device.type} in {dtype}, because {why}")
