"""Host time a sequence and step of the engine's loop, by part: a target that answers at once, and plain decoding.

The target is the one all runtimes share, over a backend that hands out logits made beforehand. Process time, and of
all steps of a part of the run the fastest stretch: other programs may run beside it. With `--device cuda` wall-clock
time instead, the device's own part of choosing tokens included. `--together`: tokens are chosen as on a GPU, for all
sequences at once; with a small vocabulary next to nothing of that is arithmetic, and what is left is the host's part.
Run: python benchmarks/costs/engine_host.py [--sequences 1,16,64] [--vocabulary 49152] [--settings greedy,sampled]
     [--together] [--no-text] [--listen] [--device cuda] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.control.fixed import Fixed
from outrider.core import engine as engine_module
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe, Target
from outrider.core.records import Budget, Needs, Scores, Traits
from outrider.core.rows import choices
from outrider.core.rows import judge as judging
from outrider.core.sampling import SamplingParams
from outrider.core.schedule import Terms
from outrider.core.sequence import Running
from outrider.core.text import token_decoder
from outrider.runtime.backend import Bounds
from outrider.runtime.blocks.allocator import Allocator
from outrider.runtime.blocks.stretches import StretchSlots
from outrider.runtime.flight import Block
from outrider.runtime.slots import SlotTarget
from outrider.verify.invariant import Invariant

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, minimum length": {"min_new_tokens": 1000},
    "greedy, penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "sampled": {"temperature": 1.0},
    "sampled, minimum length": {"temperature": 1.0, "min_new_tokens": 1000},
    "sampled, penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "sampled, top-p": {"temperature": 0.8, "top_p": 0.95},
    "sampled, top-k and min-p": {"temperature": 0.8, "top_k": 50, "min_p": 0.02},
}
PARTS: list[tuple[str, object, str]] = [  # whose time is counted apart, less that of the parts inside it
    ("draft", Engine, "_draft"),
    ("pass", engine_module, "run_pass"),
    ("backend", SlotTarget, "_pass"),
    ("judge", engine_module, "judge"),
    ("choose", judging, "choose"),
    ("emit", Running, "emit"),
    ("text", Running, "read"),
    ("commit", SlotTarget, "commit"),
    ("tell", Engine, "_tell"),
    ("deliver", Running, "deliver"),
]
WARM, STRETCH = 8, 8  # steps before any is counted, and steps of which the fastest stretch counts
ROUNDS = 32  # passes before the same logits come again


class NoCache:
    bytes = 0

    def keep(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing is kept."""

    def wipe(self, slot: int) -> None:
        """Nothing was."""


class ReadyBackend:
    """Answers every pass with logits that were made beforehand."""

    token_bytes, block_size, reserves = 1, 1, True
    max_rows = prompt_rows = None
    traits = Traits("ready", mixes=True)

    def __init__(self, sequences: int, vocabulary: int, device: torch.device) -> None:
        self.device, self.vocab_size, self._passes = device, vocabulary, 0
        rng = np.random.default_rng(0)
        rows = rng.standard_normal((sequences + ROUNDS, vocabulary), dtype=np.float32) * 3
        rows[:, 0] = -50.0  # the token that ends a text
        logits = torch.from_numpy(rows).to(device)
        likeliest = rows.argmax(1).tolist()
        self._scores = [
            [
                Scores(logits[i : i + 1], likeliest=(likeliest[i],), among=(logits, i))
                for i in range(first, first + sequences)
            ]
            for first in range(ROUNDS)
        ]

    def slot_bytes(self, rows: int) -> int:
        return 0

    def positions(self) -> tuple[int, str]:
        return 4096, "the benchmark ends there"

    def allocate(self, bounds: Bounds) -> tuple[Any, Allocator]:
        cache: Any = NoCache()
        return cache, StretchSlots(cache, bounds.slots, bounds.slots * bounds.capacity)

    def check(self, target: Target, self_test: bool | None) -> None:
        """There is no model."""

    def prepare(self, contexts: Sequence[int], needs: Needs) -> None:
        """Nothing is made later."""

    def run(self, blocks: Sequence[Block], needs: Needs) -> list[Scores]:
        self._passes += 1
        ready = self._scores[self._passes % ROUNDS]
        return [Scores(None) if b.text else ready[i] for i, b in enumerate(blocks)]


@dataclass
class Clock:
    """Nanoseconds of each part, without what is inside another."""

    now: Callable[[], int]
    parts: dict[str, int] = field(default_factory=dict)
    _inside: list[str] = field(default_factory=lambda: ["rest"])
    _since: int = 0

    def switch(self) -> None:
        now = self.now()
        self.parts[self._inside[-1]] = self.parts.get(self._inside[-1], 0) + now - self._since
        self._since = now

    def counted(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            self.switch()
            self._inside.append(part)
            try:
                return call(*given, **named)
            finally:
                self.switch()
                self._inside.pop()

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        kept = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS if hasattr(owner, name)]
        for part, owner, name in PARTS:
            if hasattr(owner, name):
                setattr(owner, name, self.counted(part, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, call in kept:
                setattr(owner, name, call)


def measure(sequences: int, params: SamplingParams, options: argparse.Namespace, by_part: bool) -> dict[str, float]:
    """Microseconds a sequence and step: of the whole step, or of each part of it."""
    target = SlotTarget(ReadyBackend(sequences, options.vocabulary, options.device), max_slots=sequences)
    decode = token_decoder(options.tokenizer) if options.tokenizer is not None else None
    recipe = Recipe("plain", None, Invariant(), Fixed(Budget(0, 0)))
    engine = Engine(target, recipe, eos_ids=(0,), decode=decode, strict=True)
    told: list[object] = []
    listener = told.append if options.listen else None
    for i in range(sequences):
        engine.submit([1 + i, 2, 3], params, terms=Terms(cache_salt=str(i)), listener=listener)
    for _ in range(WARM):
        engine.step()
    clock = Clock(time.perf_counter_ns if options.device.type == "cuda" else time.process_time_ns)
    found: list[dict[str, float]] = []
    for _ in range(options.steps // STRETCH):
        clock.parts.clear()
        if by_part:
            with clock.watching():
                clock._since = clock.now()
                for _ in range(STRETCH):
                    engine.step()
                clock.switch()
        else:
            clock._since = clock.now()
            for _ in range(STRETCH):
                engine.step()
            clock.switch()
        found.append({part: ns / 1e3 / STRETCH / sequences for part, ns in clock.parts.items()})
    engine.close()
    return min(found, key=lambda parts: sum(parts.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--settings", help="names that begin so, separated by semicolons; all without it")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--together", action="store_true", help="rows are chosen together, as on a GPU")
    parser.add_argument("--text", action=argparse.BooleanOptionalAction, default=True, help="tokens become text")
    parser.add_argument("--listen", action="store_true", help="somebody is told of every step")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.together:
        choices.cheap_together = lambda _: True
    options.tokenizer = tokenizer() if options.text else None
    wanted = options.settings.split(";") if options.settings else [""]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, given in SETTINGS.items():
        if not any(name == want or name.startswith(want + ",") or not want for want in wanted):
            continue
        params = SamplingParams(max_new_tokens=2000, seed=1, **given)
        for count in map(int, options.sequences.split(",")):
            whole = measure(count, params, options, by_part=False)
            parts = measure(count, params, options, by_part=True)
            figures.setdefault(name, {})[str(count)] = {"whole": whole["rest"], **parts}
    result = {"vocabulary": options.vocabulary, "text": options.text, "listen": options.listen, "us": figures}
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    names = ["whole", *dict.fromkeys(part for part, _, _ in PARTS), "rest"]
    print(f"microseconds of host time a sequence and step, vocabulary of {options.vocabulary}")
    print(f"{'':<28}" + "".join(f"{name:>9}" for name in names))
    for setting, counts in figures.items():
        for count, parts in counts.items():
            cells = "".join(f"{parts.get(name, 0.0):>9.1f}" for name in names)
            print(f"{setting:<25}{count:>3}{cells}")


def tokenizer() -> Any:
    """The embedded model's."""
    from outrider.models.load import load_model

    return load_model("smollm2").tokenizer


if __name__ == "__main__":
    main()
