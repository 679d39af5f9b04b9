"""What the benchmarks that generate share: their arguments, the model and prompts they name, and where results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

import outrider
from outrider.api import Outrider
from outrider.bench.compare import Comparison, Plan, compare, per_group
from outrider.bench.contenders import Contender
from outrider.bench.figures import result
from outrider.bench.report import terminal
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.store.prompts import Prompt, built_in_prompts, read_prompts


def arguments(description: str | None, max_new_tokens: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL; the built-in prompts without it")
    parser.add_argument("--limit", type=int, help="first so many prompts of each group")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    return parser


@contextmanager
def loaded(args: argparse.Namespace) -> Iterator[tuple[Outrider, list[Prompt]]]:
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    with outrider.load(args.model, method="plain", device=args.device, dtype=args.dtype, max_slots=1) as engine:
        yield engine, prompts


def measure(
    args: argparse.Namespace, engine: Outrider, prompts: Sequence[Prompt], contenders: Sequence[Contender],
    temperature: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    return result(compared(args, engine, prompts, contenders, temperature))


def compared(
    args: argparse.Namespace, engine: Outrider, prompts: Sequence[Prompt], contenders: Sequence[Contender],
    temperature: float = 0.0,
) -> Comparison:  # fmt: skip
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, seed=1)
    source = Path(args.prompts).name if args.prompts else "built-in"
    comparison = compare(engine, prompts, contenders, Plan(params, args.rounds), source, _progress)
    if not comparison.complete:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130)
    return comparison


def give(args: argparse.Namespace, payload: dict[str, Any], lines: Sequence[str], *results: dict[str, Any]) -> None:
    """JSON where it was asked for, else tables and what follows from them."""
    content = json.dumps(payload, indent=2)
    if args.json == "-":
        print(content)
        return
    if args.json:
        Path(args.json).write_text(content + "\n", encoding="utf-8")
    for one in results:
        Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(terminal(one))
    print("\n".join(lines))


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except OutriderError as error:
        sys.exit(f"error: {error}")


def _progress(done: int, total: int, doing: str) -> None:
    if sys.stderr.isatty() and doing:
        print(f"\r\x1b[K{done}/{total} {doing}", end="" if done < total else "\n", file=sys.stderr, flush=True)
