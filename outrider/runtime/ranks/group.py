"""The processes that hold one model together: started, told what to do, asked whether they live, and ended.

Rank 0 is the caller's process; it starts the others on this machine and sends them every call that changes state. They
meet on the loopback address. A rank that dies is noticed by the next exchange, which fails there, or after `TIMEOUT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.core.errors import InputError, OutriderError

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)  # of one exchange: a rank may load its part of a large model meanwhile
LAST_WORDS = 2_000  # characters of what a rank wrote that are looked at for its last line
END = "end"  # the call after which a rank leaves


class RankLost(OutriderError):
    """A process that holds a part of the model has ended, so that the model can run no more."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank needs to load its part of a model, as plain values."""

    rank: int
    ranks: int
    port: int
    model: str
    dtype: str | None
    revision: str | None
    trust_remote_code: bool
    limits: Mapping[str, Any]

    def json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Group:
    """Rank 0's view of the others."""

    ranks: int
    processes: list[subprocess.Popen[bytes]]
    written: list[Path]  # what each of them says, for the message when it dies
    lost: str = ""

    def awaited(self, store: TCPStore) -> None:
        """Return once every rank has come to the meeting place; raise where one ends before."""
        while not store.check([f"here/{rank}" for rank in range(1, self.ranks)]):
            self.check()
            time.sleep(0.05)

    def tell(self, name: str, *values: Any) -> None:
        """Send a call to every other rank."""
        self.check()
        try:
            dist.broadcast_object_list([(name, values)], src=0)
        except RuntimeError as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> RankLost:
        """Changes state: the group is unusable from now on. What to raise for an exchange that failed."""
        with suppress(subprocess.TimeoutExpired):  # a rank whose connection broke may still be about to end
            for process in self.processes:
                process.wait(timeout=2)
        if not self.lost:
            self.lost = self._dead() or f"the exchange between the ranks failed ({str(error).splitlines()[0]})"
        return RankLost(f"{self.lost}; the model is incomplete: load it again")

    def check(self) -> None:
        """Raise where a rank is gone."""
        if not self.lost and (dead := self._dead()):
            self.lost = dead
        if self.lost:
            raise RankLost(f"{self.lost}; the model is incomplete: load it again")

    @property
    def killed(self) -> bool:
        return any((process.poll() or 0) < 0 for process in self.processes)

    def _dead(self) -> str:
        for number, process in enumerate(self.processes, 1):
            if (code := process.poll()) is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
                said = self.written[number - 1].read_text(errors="replace")[-LAST_WORDS:].strip().splitlines()
                return f"rank {number} of {self.ranks} {how}" + (f" ({said[-1]})" if said and code > 0 else "")
        return ""

    def close(self) -> None:
        """End the other ranks; those that do not leave are killed."""
        if not self.lost and not self._dead():
            with suppress(RuntimeError):
                dist.broadcast_object_list([(END, ())], src=0)
        self.lost = self.lost or "the model was closed"
        for process in self.processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for path in self.written:
            path.unlink(missing_ok=True)
        if dist.is_initialized():
            dist.destroy_process_group()


def start(parts: Sequence[Part]) -> Group:
    """Start ranks 1 and up; `parts` has one of each. Returns before they have loaded anything."""
    if dist.is_initialized():
        raise InputError("one model a process can be spread over ranks; close the other first")
    processes, written = [], []
    for part in parts:
        file, name = tempfile.mkstemp(prefix=f"outrider-rank-{part.rank}-", suffix=".log")
        command = [sys.executable, "-m", "outrider.runtime.ranks.follow", part.json()]
        with os.fdopen(file, "wb") as log:
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log))
        written.append(Path(name))
    return Group(len(parts) + 1, processes, written)


def meeting_place() -> TCPStore:
    """Where ranks find each other; it takes a free port of the loopback address."""
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def join(store: TCPStore, rank: int, ranks: int) -> None:
    """Changes state: this process is a rank from now on. Waits until all of them are there."""
    os.environ["LOCAL_RANK"] = str(rank)  # by which transformers picks the GPU of this process
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store.set(f"here/{rank}", "")
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
