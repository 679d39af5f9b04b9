"""A peer's process: started in its own environment, asked over pipes, and told apart from us when it dies.

A crash, a hang or an error in a peer becomes a `PeerError` with the last lines it said; a later call starts it again.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from outrider.bench.compare import Unsupported
from outrider.bench.contenders import Run
from outrider.bench.environments import PeerInfo
from outrider.core.errors import OutriderError
from outrider.core.generation import Stats
from outrider.core.params import SamplingParams

WORKER = Path(__file__).parent / "peers" / "worker.py"
ANSWER_S = 600.0
TAIL = 3  # last lines of what it said that an error quotes
KNOWN = ("temperature", "top_k", "top_p", "seed", "max_new_tokens", "ignore_eos")  # what peers are asked for


class PeerError(OutriderError):
    """A peer that died, hung or refused."""


class PeerProcess:
    """One worker. Not for two threads."""

    def __init__(self, python: Path, adapter: str, worker: Path = WORKER, timeout_s: float = ANSWER_S) -> None:
        self.timeout_s = timeout_s
        self.said: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(python), str(worker), adapter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said,
            text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is ours to handle
        )  # fmt: skip
        self.replies: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def load(self, mode: str, settings: dict[str, Any]) -> dict[str, Any]:
        return self.ask({"do": "load", "mode": mode, "settings": settings})["facts"]

    def generate(self, mode: str, prompts: Sequence[list[int]], params: dict[str, Any]) -> dict[str, Any]:
        return self.ask({"do": "generate", "mode": mode, "prompts": list(prompts), "params": params})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.replies.get(timeout=self.timeout_s)
        except (OSError, ValueError):
            line = ""
        except queue.Empty:
            self.close()
            raise PeerError(f"gave no answer for {self.timeout_s:.0f} s{self._last_words()}") from None
        if not line:
            self.close()
            raise PeerError(f"its process ended with status {self.process.returncode}{self._last_words()}")
        reply = json.loads(line)
        if "unsupported" in reply:
            raise Unsupported(reply["unsupported"])
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def close(self) -> None:
        """End it. Safe to call twice."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.replies.put(line)
        self.replies.put("")  # the end

    def _last_words(self) -> str:
        self.said.seek(0)
        lines = [line.strip() for line in self.said.read().splitlines() if line.strip()]
        return f": {' · '.join(lines[-TAIL:])}" if lines else ""


@dataclass(slots=True)
class Processes:
    """The peers that run, by peer, or by peer and mode where modes do not share a process."""

    running: dict[tuple[str, str], PeerProcess] = field(default_factory=dict)

    def get(self, peer: PeerInfo, mode: str, python: Path) -> PeerProcess:
        key = (peer.name, mode if peer.process_a_mode else "")
        if key not in self.running or not self.running[key].alive:
            self.running[key] = PeerProcess(python, peer.adapter)
        return self.running[key]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.close()


@dataclass(frozen=True, slots=True)
class PeerRunner:
    process: PeerProcess
    label: str
    mode: str
    eos: tuple[int, ...]
    plain: bool

    def __call__(self, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
        reply = self.process.generate(self.mode, prompts, asked(params, self.eos))
        outputs = tuple(trim(tokens, params, self.eos) for tokens in reply["outputs"])
        new = sum(map(len, outputs))
        steps = int(reply["steps"])
        stats = Stats(self.label, prompt_tokens=sum(map(len, prompts)), new_tokens=new)
        # of a batch only plain decoding is known to take a step a token
        stats.steps = steps if len(prompts) == 1 else new if self.plain else 0
        stats.first_token_s, stats.verify_s = reply["first_s"], reply["total_s"] - reply["first_s"]
        return Run(
            outputs, ("",) * len(outputs), stats, steps, reply["total_s"], max(new - int(reply["early"]), 0),
            comparable=params.greedy, split=False, peak_bytes=reply["peak_bytes"],
        )  # fmt: skip


def trim(tokens: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> tuple[int, ...]:
    """Cut once, by one rule for every runtime: behind the first end-of-text token, and at the limit."""
    kept = tuple(int(token) for token in tokens[: params.max_new_tokens])
    ends = () if params.ignore_eos else eos
    return next((kept[: i + 1] for i, token in enumerate(kept) if token in ends), kept)


def asked(params: SamplingParams, eos: Sequence[int]) -> dict[str, Any]:
    """The parameters that all runtimes mean the same by; others are refused rather than dropped."""
    plain = SamplingParams(**{name: getattr(params, name) for name in KNOWN})
    other = [name for name in params.__slots__ if getattr(params, name) != getattr(plain, name)]
    if other:
        raise Unsupported(f"peers are not asked for {', '.join(other)}")
    return {**{name: getattr(params, name) for name in KNOWN}, "eos_ids": list(eos)}
