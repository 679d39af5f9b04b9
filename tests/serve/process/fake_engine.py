"""A stand-in for the engine's process: it starts in a moment, speaks the same frames, and its texts are known.

The token at place i of a text is a function of the prompt, the seed, the sample and i, as under the invariant rule.
Settings: `step_s` between steps, `fail` to refuse to load, `load_s`, `die_after` steps (once, where `flag` is no file).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.serve.process.framing import Message, Wire


def token_at(prompt: list[int], seed: int, sample: int, place: int) -> int:
    return hash((tuple(prompt), seed, sample, place)) % 1000


@dataclass
class Engine:
    settings: dict[str, Any] = field(default_factory=dict)
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0
    cancelled: list[str] = field(default_factory=list)
    stepping: asyncio.Task[None] | None = None

    async def run(self, channel: socket.socket) -> None:
        ended = asyncio.Event()
        self.wire = Wire(self.hear, ended.set)
        await asyncio.get_running_loop().create_connection(lambda: self.wire, sock=channel)
        await ended.wait()
        if self.stepping is not None:
            self.stepping.cancel()

    def hear(self, messages: list[Message]) -> None:
        for kind, number, *rest in messages:
            if kind == "load":
                asyncio.get_running_loop().create_task(self.load(number, rest[0]))
            elif kind == "submit":
                self.submit(number, rest[0])
            elif kind == "cancel":
                self.cancelled.append(rest[0])
                self.wire.say("reply", number, rest[0] in self.running)
            elif kind == "close":
                self.wire.say("reply", number, True)
                asyncio.get_running_loop().call_later(0.01, os._exit, 0)
            elif kind == "save":
                Path(self.settings["memory"]).write_text(str(self.steps))
                self.wire.say("reply", number, True)
            else:
                answers: dict[str, Any] = {"stats": self.stats(), "slots": [{"id": name} for name in self.running]}
                self.wire.say("reply", number, answers.get(kind))

    async def load(self, number: int, settings: dict[str, Any]) -> None:
        self.settings = settings
        await asyncio.sleep(settings.get("load_s", 0.0))
        if settings.get("fail") and Path(settings["fail"]).exists():
            self.wire.say("refused", number, ["InputError", "no such model"])
            return
        info = {"model": "fake", "method": "mix", "methods": ["mix"], "vocab_size": 1000, "max_context": 4096,
                "slots": 8, "eos_ids": [], "same_bits": True}  # fmt: skip
        self.wire.say("reply", number, info)
        self.stepping = asyncio.create_task(self.work())

    def submit(self, number: int, request: dict[str, Any]) -> None:
        if 999 in request["prompt"]:
            self.wire.say("refused", number, ["InputError", "token 999 is not liked"])
            return
        if len(self.running) >= self.settings.get("places", 1000):
            self.wire.say("refused", number, ["FullQueue", "as many wait as may"])
            return
        if 666 in request["prompt"]:
            os._exit(9)
        first, n = request["sample"], request["params"].get("n", 1)
        texts = {sample: len(request["resume"]) for sample in range(first, first + n)}
        self.running[request["id"]] = {"request": request, "texts": texts}
        self.wire.say("reply", number, True)

    async def work(self) -> None:
        while True:
            await asyncio.sleep(self.settings.get("step_s", 0.002))
            self.step()

    def step(self) -> None:
        flag = self.settings.get("flag")
        if self.running:
            self.steps += 1
        if flag and self.steps == self.settings["die_after"] and not Path(flag).exists():
            Path(flag).touch()
            self.wire.flush()
            os._exit(9)
        for name, one in list(self.running.items()):
            request = one["request"]
            params, resumed = request["params"], bool(request["resume"])
            for sample, length in list(one["texts"].items()):
                reason = "cancelled" if name in self.cancelled else ""
                if not reason:
                    token = token_at(request["prompt"], params.get("seed", 0), sample, length)
                    delta = ["d", sample, [token], f"{token} ", [["fake", 1]], None, 1]
                    self.wire.say("event", name, delta)
                    one["texts"][sample] = length = length + 1
                    reason = "length" if length >= params.get("max_new_tokens", 128) else ""
                if reason:
                    end = {"sample": sample, "finish": reason, "stats": {"new_tokens": length},
                           "seed": params.get("seed", 0), "resumed": "same text" if resumed else ""}  # fmt: skip
                    self.wire.say("event", name, ["e", end])
                    del one["texts"][sample]
            if not one["texts"]:
                del self.running[name]
        self.wire.say("stats", 0, self.stats())

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.running), "steps": self.steps}


if __name__ == "__main__":
    asyncio.run(Engine().run(socket.socket(fileno=int(sys.argv[1]))))
