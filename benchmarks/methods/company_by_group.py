"""Many sequences at once, by kind of text: the default method against plain decoding, 1 to 16 sequences kept running.

One sequence joins as another ends, and every answer has exactly `--max-new-tokens` tokens, past its end of text. Speed
is of steps in which all of them decode and no prompt runs; what is left when the prompts are used up (the drained
batch) stands beside it, and so does everything together, prompts included. Methods take turns within a round; of the
rounds the median counts, of each group of prompts.
Run: python benchmarks/methods/company_by_group.py --prompts FILE.jsonl [--limit N] [--sequences 1,4,8,16]
     [--temperature 0,1] [--methods plain,mix] [--runtime native] [--precision int8] [--rounds 3] [--json [FILE]]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import outrider
from benchmarks.common import arguments, run
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.core.params import SamplingParams
from outrider.core.schedule import StepReport, Terms
from outrider.store.prompts import built_in_prompts, read_prompts

RUNS = itertools.count()


@dataclass(frozen=True, slots=True)
class Ran:
    """One method over the prompts of one group."""

    group: str
    sequences: int
    temperature: float
    method: str
    tokens_per_s: float  # of steps in which all run
    drained_tokens_per_s: float  # of the steps after that
    all_tokens_per_s: float  # prompts included, by the clock
    accepted_length: float
    rows: float  # of a full step
    draft_ms: float  # a full step
    verify_ms: float
    rest_ms: float


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--sequences", default="1,4,8,16")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--methods", default="plain,mix", help="the first is what the others are held against")
    parser.add_argument("--runtime", default="native")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--max-context", type=int, default=2048)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sequences.split(",")]
    temperatures = [float(temperature) for temperature in args.temperature.split(",")]
    methods = args.methods.split(",")
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    ran: list[Ran] = []
    with outrider.load(
        args.model, method=methods[0], device=args.device, dtype=args.dtype, runtime=args.runtime,
        precision=args.precision, max_slots=max(sizes), max_context=args.max_context,
    ) as engine:  # fmt: skip
        texts: dict[str, list[list[int]]] = {}
        for prompt in prompts:
            ids = engine.encode_chat(prompt.conversation(()))
            texts.setdefault(prompt.group, []).append(ids[-(args.max_context - args.max_new_tokens - 64) :])
        for method in methods:  # what is compiled or measured at first use does not count
            several(engine, method, "", next(iter(texts.values()))[:2], 2, 1.0, 24)
        settings = list(itertools.product(range(args.rounds), temperatures, sizes, texts))
        for done, (_, temperature, size, group) in enumerate(settings):
            for method in methods:
                some = (texts[group] * size)[: max(len(texts[group]), 2 * size)]
                ran.append(several(engine, method, group, some, size, temperature, args.max_new_tokens))
            print(f"{done + 1} of {len(settings)}", end="\r", file=sys.stderr, flush=True)
            rows = table_rows(ran, methods)
            payload = {"command": sys.argv[1:], "rows": rows, "runs": [asdict(one) for one in ran]}
            if args.json and args.json != "-":  # what was measured stays, whatever ends the run
                Path(args.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
    if args.json == "-":
        print(json.dumps(payload, indent=2))
        return
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(shown(rows))


def several(
    engine: Outrider, method: str, group: str, prompts: Sequence[list[int]], size: int, temperature: float, tokens: int
) -> Ran:
    """All prompts, `size` at a time."""
    recipe = engine.recipe(method)
    for part in (recipe.controller, recipe.drafter):
        if hasattr(part, "forget"):
            part.forget()
    left, live, reports = list(enumerate(prompts)), [], list[StepReport]()
    end = engine.engine.watch(reports.append)
    terms = Terms(cache_salt=str(next(RUNS)))  # nobody finds what another one's prompts left
    begun = time.perf_counter()
    while left or live:
        while left and len(live) < size:
            number, prompt = left.pop(0)
            params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True)
            live.append(engine.engine.submit(prompt, params, recipe, terms=terms))
        engine.step()
        live = [handle for handle in live if not handle.done]
    seconds = time.perf_counter() - begun
    end()
    full = [report for report in reports if report.sequences == size and not report.prompt_rows]
    drained = [report for report in reports if report.sequences < size and not report.prompt_rows]
    steps = max(len(full), 1)
    return Ran(
        group, size, temperature, method, speed(full), speed(drained), sum(r.emitted for r in reports) / seconds,
        sum(r.emitted for r in full) / max(sum(r.sequences for r in full), 1), sum(r.timing.rows for r in full) / steps,
        *(1e3 * sum(getattr(r.timing, part) for r in full) / steps for part in ("draft", "verify", "rest")),
    )  # fmt: skip


def speed(reports: Sequence[StepReport]) -> float:
    seconds = sum(report.timing.total for report in reports)
    return sum(report.emitted for report in reports) / seconds if seconds else 0.0


def table_rows(ran: Sequence[Ran], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Medians of the rounds; ratios are medians of each round's ratio."""
    found: dict[tuple[float, int, str], dict[str, list[Ran]]] = {}
    for one in ran:
        found.setdefault((one.temperature, one.sequences, one.group), {}).setdefault(one.method, []).append(one)
    rows = []
    for (temperature, size, group), by_method in found.items():
        plain = by_method[methods[0]]
        for method in methods:
            mine = by_method[method]
            figures = {name: median(getattr(one, name) for one in mine)
                       for name in ("tokens_per_s", "drained_tokens_per_s", "all_tokens_per_s", "accepted_length",
                                    "rows", "draft_ms", "verify_ms", "rest_ms")}  # fmt: skip
            pairs = list(zip(mine, plain, strict=True))
            ratios = {"ratio": median(one.tokens_per_s / max(base.tokens_per_s, 1e-9) for one, base in pairs),
                      "all_ratio": median(one.all_tokens_per_s / max(base.all_tokens_per_s, 1e-9)
                                          for one, base in pairs)}  # fmt: skip
            rows.append({"temperature": temperature, "sequences": size, "group": group, "method": method,
                         **ratios, **figures})  # fmt: skip
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("temperature", "sequences", "group", "method", "tokens/s", "ratio", "drained", "all", "ratio",
                 "accepted", "rows", "draft ms", "verify ms", "rest ms"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("group", "method") else "right")
    for row in rows:
        table.add_row(
            f"{row['temperature']:g}", str(row["sequences"]), row["group"], row["method"], f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}x", f"{row['drained_tokens_per_s']:.0f}", f"{row['all_tokens_per_s']:.0f}",
            f"{row['all_ratio']:.2f}x", f"{row['accepted_length']:.2f}", f"{row['rows']:.1f}",
            f"{row['draft_ms']:.2f}", f"{row['verify_ms']:.2f}", f"{row['rest_ms']:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    run(main)
