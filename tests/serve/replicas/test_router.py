"""Behind `sglang-router`: the same answers through it, while a worker is killed and another one takes its place."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang_router", reason="needs sglang-router: pip install sglang-router")
pytestmark = pytest.mark.slow

PROMPTS = ["Count to twenty: one, two,", "def fib(n):\n", "The capital of France is", "Dear Sir or Madam,"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(url: str, body: Any = None, timeout: float = 120) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=timeout) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text


def until(url: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            call(url, timeout=5)
            return
        if time.monotonic() > end:
            pytest.fail(f"{url} does not answer")
        time.sleep(0.3)


class Running:
    """Processes with a group of their own each, so that a kill takes a server and its engine together."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            made = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(made)
        return made

    def worker(self) -> tuple[str, subprocess.Popen[bytes]]:
        port = free_port()
        process = self.start(
            sys.executable, "-m", "outrider", "serve", "--port", str(port), "--runtime", "native",
            "--precision", "int8", "--in-process", "--max-context", "512",
        )  # fmt: skip
        return f"http://127.0.0.1:{port}", process

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.end()


def ask(base: str, number: int) -> str:
    body = {
        "model": "smollm2", "prompt": PROMPTS[number % 4], "max_tokens": 40, "seed": number, "ignore_eos": True,
        "temperature": 0.8 * (number % 2),
    }  # fmt: skip
    return str(call(f"{base}/v1/completions", body)["choices"][0]["text"])


def texts(base: str, numbers: Sequence[int]) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(base, number), numbers))


def test_a_worker_is_killed_and_replaced_and_no_answer_changes(running: Running) -> None:
    workers = [running.worker() for _ in range(2)]
    for url, _ in workers:
        until(f"{url}/ready")
    router = f"http://127.0.0.1:{free_port()}"
    running.start(
        sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", router.rpartition(":")[2],
        "--policy", "cache_aware", "--worker-urls", *(url for url, _ in workers), "--prometheus-port", str(free_port()),
        "--prometheus-host", "127.0.0.1", "--health-check-interval-secs", "2", "--retry-max-retries", "10",
    )  # fmt: skip
    until(f"{router}/health")
    numbers = range(24)
    direct = texts(workers[0][0], numbers)
    assert texts(router, numbers) == direct

    killer = threading.Timer(1.0, lambda: os.killpg(workers[1][1].pid, signal.SIGKILL))
    killer.start()
    assert texts(router, numbers) == direct  # the kill falls into these
    killer.join()
    assert texts(router, numbers) == direct

    url, _ = running.worker()
    until(f"{url}/ready")
    call(f"{router}/workers", {"url": url})
    os.killpg(workers[0][1].pid, signal.SIGKILL)  # only the new one is left
    end = time.monotonic() + 60
    while str(call(f"{router}/workers")).find(url) < 0:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert texts(router, numbers) == direct
