"""Throughput of N sequences kept running: a new one joins as one ends, answers of exactly so many tokens.

Only tokens that come while N are running count, and prompts that run meanwhile are part of that time. Ours run in this
process; llama.cpp's server, if it is asked for, in an environment apart, asked over HTTP by N clients with the same
prompts as token ids. Prompts are met once each, so that nobody finds them in a cache.
Run: python benchmarks/company.py [--model smollm2] [--runtime native] [--precision int8] [--methods plain,mix]
     [--sequences 1,4,8] [--prompts FILE.jsonl] [--temperature 0] [--max-new-tokens 128] [--rounds 3]
     [--set mix.budget=15] [--llama-cpp q8] [--json [FILE]]
     [--shape 8b --device cuda --dtype bfloat16 --runtime graphs --precision ""]: widened in memory
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import outrider
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.bench.contenders import parse_specs
from outrider.bench.inflate import inflate, parse_shape
from outrider.bench.load.servers import Server, Setting, running
from outrider.bench.systems import _embedded_gguf
from outrider.bench.twin import twin_gguf
from outrider.cli.options import parse_options
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe
from outrider.core.schedule import StepReport, Terms
from outrider.models import load_model
from outrider.models.drafts import shipped_draft
from outrider.models.trained import load_eagle3
from outrider.store.prompts import built_in_prompts, read_prompts

LLAMA = "llama.cpp"
JOINING = 2  # requests a sequence: the first of each begins together with the others
Prompts = Iterator[list[int]]


@dataclass
class Steps:
    """Steps in which that many sequences decoded and no prompt ran: decoding alone."""

    sequences: int
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0

    def told(self, report: StepReport) -> None:
        timing = report.timing
        if timing.batch < self.sequences or timing.prompt_rows:
            return
        self.steps += 1
        self.tokens += report.emitted
        self.rows += timing.rows
        self.draft, self.verify, self.rest = (
            self.draft + timing.draft,
            self.verify + timing.verify,
            self.rest + timing.rest,
        )

    @property
    def rate(self) -> float:
        return self.tokens / max(self.draft + self.verify + self.rest, 1e-9)

    def summary(self) -> dict[str, float]:
        """Of one step: rows, tokens of a sequence, milliseconds."""
        count = max(self.steps, 1)
        times = {name: 1e3 * getattr(self, name) / count for name in ("draft", "verify", "rest")}
        return {
            "steps": self.steps,
            "rows": self.rows / count,
            "accepted": self.tokens / count / self.sequences,
        } | times


@dataclass(frozen=True)
class Found:
    rate: float  # tokens a second while all run, prompts of those who join included
    decoding: float = 0.0  # in steps without prompts
    step: dict[str, float] = field(default_factory=dict)


@dataclass
class Window:
    """When tokens came, of how many sequences that ran just then."""

    sequences: int
    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    first: set[int] = field(default_factory=set)  # who has said something
    lock: threading.Lock = field(default_factory=threading.Lock)

    def told(self, who: int, tokens: int) -> None:
        with self.lock:
            now = time.perf_counter()
            if self.began and not self.ended:
                self.tokens += tokens
            self.first.add(who)
            if not self.began and len(self.first) == self.sequences:
                self.began = now

    def over(self) -> None:
        """Somebody has nothing more to do."""
        with self.lock:
            self.ended = self.ended or time.perf_counter()

    @property
    def rate(self) -> float:
        return self.tokens / (self.ended - self.began)


def ours(engine: Outrider, recipe: Recipe, count: int, prompts: Prompts, params: SamplingParams, salt: str) -> Found:
    terms, window, steps = Terms(cache_salt=salt), Window(count), Steps(count)
    left = count * JOINING
    stop = engine.engine.watch(steps.told)

    def another() -> Any:
        return engine.engine.submit(next(prompts), params, recipe, terms=terms)

    handles = [another() for _ in range(count)]
    seen = [0] * count
    while not window.ended:
        engine.step()
        for who, handle in enumerate(handles):
            said = handle.sequences[0].history.generated
            if said > seen[who]:
                window.told(who, said - seen[who])
                seen[who] = said
            if handle.done:
                left -= 1
                if left < count:
                    window.over()
                    break
                handles[who], seen[who] = another(), 0
    stop()
    for handle in handles:
        handle.cancel()
    engine.step()
    return Found(window.rate, steps.rate, steps.summary())


def theirs(server: Server, count: int, prompts: Prompts, new: int) -> float:
    window, left, lock = Window(count), [count * JOINING], threading.Lock()

    def client(who: int) -> None:
        while not window.ended:
            with lock:
                prompt = next(prompts)
            body = {"prompt": prompt, "n_predict": new, "ignore_eos": True, "stream": True, "temperature": 0,
                    "cache_prompt": False}  # fmt: skip
            request = urllib.request.Request(
                server.url("/completion"), json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            said = 0
            with urllib.request.urlopen(request) as answer:
                for line in answer:
                    if line.startswith(b"data: "):
                        tokens = json.loads(line[6:]).get("tokens") or ()
                        window.told(who, min(len(tokens), new - said))
                        said += len(tokens)
            with lock:
                left[0] -= 1
                if left[0] < count:
                    window.over()

    threads = [threading.Thread(target=client, args=(who,)) for who in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return window.rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="native")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--methods", default="plain,mix")
    parser.add_argument("--sequences", default="1,4,8")
    parser.add_argument("--prompts", help="JSONL; the built-in prompts without it")
    parser.add_argument("--limit", type=int, help="first so many prompts of each group")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", default="0", help="one or several, such as 0,1")
    parser.add_argument("--set", action="append", default=[], metavar="LABEL.OPTION=VALUE")
    parser.add_argument("--shape", help="widen the model in memory, such as 8b")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--cache-gib", type=int, default=0, help="of keys and values; 0: as the runtime chooses")
    parser.add_argument("--threads", type=int, default=2, help="of the peer")
    parser.add_argument(
        "--llama-cpp", choices=("q8", "f32"), help="beside its server with the embedded model's weights"
    )
    parser.add_argument("--json", nargs="?", const="-")
    args = parser.parse_args()
    counts = [int(one) for one in args.sequences.split(",")]
    read = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    rows: list[dict[str, Any]] = []
    with loaded(args, max(counts)) as engine:
        texts = [engine.encode_chat(prompt.conversation()) for prompt in read]
        for temperature in map(float, args.temperature.split(",")):
            params = SamplingParams(
                max_new_tokens=args.max_new_tokens, ignore_eos=True, temperature=temperature,
                seed=1 if temperature else None,
            )  # fmt: skip
            for spec in parse_specs(args.methods, parse_options(args.set)):
                recipe = engine.recipe(spec.method, spec.options)
                begun = time.perf_counter()
                engine.prepare()
                print(f"{spec.label}: ready after {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
                warm = params.with_(max_new_tokens=16)
                for count in counts:  # what is compiled or recorded at first use
                    ours(engine, recipe, count, endless(texts), warm, "warm")

                def run(count: int, number: int, recipe: Recipe = recipe, params: SamplingParams = params) -> Found:
                    salt = f"{recipe.name} {params.temperature} {count} {number}"
                    return ours(engine, recipe, count, endless(texts), params, salt)

                rows += measured(f"{spec.label} at {temperature:g}", counts, args.rounds, run)
    if args.llama_cpp:
        setting = Setting(
            args.model, str(twin_gguf(_embedded_gguf(), args.llama_cpp)), threads=args.threads, slots=max(counts)
        )
        with running(LLAMA, setting) as server:
            theirs(server, max(counts), endless(texts), 16)
            rows += measured(
                f"{LLAMA} {args.llama_cpp}", counts, args.rounds,
                lambda count, _: Found(theirs(server, count, endless(texts), args.max_new_tokens)),
            )  # fmt: skip
    if args.json:
        text = json.dumps(rows, indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
        return
    show(rows, counts)


def loaded(args: argparse.Namespace, slots: int) -> Outrider:
    if not args.shape:
        return outrider.load(
            args.model, "plain", runtime=args.runtime, precision=args.precision or None, max_slots=slots,
            device=args.device, dtype=args.dtype,
        )  # fmt: skip
    small = load_model(args.model, device=args.device, dtype=args.dtype)
    model = inflate(small.model, parse_shape(args.shape, small.model.config))
    engine = outrider.load(
        model,
        "plain",
        tokenizer=small.tokenizer,
        runtime=args.runtime,
        max_slots=slots,
        max_context=2048,
        cache_bytes=(args.cache_gib << 30) or None,
    )
    if (folder := shipped_draft(small, "eagle3")) is not None:
        engine.use_drafter(load_eagle3(folder, small), "eagle3")
    return engine


def endless(texts: Sequence[list[int]]) -> Prompts:
    while True:
        yield from texts


def measured(name: str, counts: Sequence[int], rounds: int, run: Callable[[int, int], Found]) -> list[dict[str, Any]]:
    """Said as it is found, so that nothing is lost where it is broken off."""
    rows = []
    for count in counts:
        found = []
        for number in range(rounds):
            found.append(run(count, number))
            step = "".join(f", {part} {value:.2f}" for part, value in found[-1].step.items())
            told = f"{found[-1].rate:.1f} tokens/s, decoding {found[-1].decoding:.1f}{step}"
            print(f"{name}, {count} at once, round {number + 1}: {told}", file=sys.stderr, flush=True)
        rows.append({
            "system": name, "sequences": count, "rounds": [one.rate for one in found],
            "tokens_per_s": median(one.rate for one in found), "decoding": median(one.decoding for one in found),
            "steps": [one.step for one in found],
        })  # fmt: skip
    return rows


def show(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> None:
    table = Table("tokens/s", *(f"{count} at once" for count in counts))
    for name in dict.fromkeys(row["system"] for row in rows):
        of = {row["sequences"]: row for row in rows if row["system"] == name}
        table.add_row(name, *(
            f"{of[count]['tokens_per_s']:.0f} ({min(of[count]['rounds']):.0f} to {max(of[count]['rounds']):.0f})"
            for count in counts
        ))  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
