"""What a shared beginning saves, and what many sequences hold.

First: the time to first token of a request, and of a second one behind the same beginning; every round with a salt of
its own. Then: many sequences that have nothing in common, all at once, and the memory that the process has taken. On
two cores it takes about five minutes.
Run: python benchmarks/serving/prefixes.py [--model smollm2] [--runtime native] [--precision int8] [--shared 1000]
     [--rounds 3] [--sequences 64] [--tokens 1000] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

import outrider
from outrider.api import Outrider
from outrider.core.params import SamplingParams
from outrider.core.schedule import Terms
from outrider.store.prompts import built_in_prompts

NEW = 24  # tokens of an answer that is compared
TOLD = 8  # sequences after whose end it is said how far it is


def told(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def long_text(engine: Outrider, tokens: int) -> list[int]:
    """The built-in prompts, one after the other, as often as it takes."""
    words = engine.encode("\n\n".join(prompt.raw() for prompt in built_in_prompts()))
    return (words * (tokens // len(words) + 1))[:tokens]


def asked(engine: Outrider, prompt: list[int], salt: str, new_tokens: int) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer, and how many tokens of the prompt were found."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    begun = time.perf_counter()
    handle = engine.engine.submit(prompt, params, terms=Terms(cache_salt=salt))
    while not handle.partial()[0].token_ids:
        engine.step()
    first = time.perf_counter() - begun
    result = handle.result()
    return first, list(result.token_ids), result.stats.cached_tokens


def shared_beginning(engine: Outrider, tokens: int, rounds: int) -> dict[str, Any]:
    text = long_text(engine, tokens)
    questions = [engine.encode(f"\n\nIn a word, what is said of {what}?") for what in ("numbers", "the sea")]
    found: list[tuple[float, float]] = []
    same = True
    for number in range(rounds + 1):
        first, _, _ = asked(engine, [*text, *questions[0]], f"{number}", NEW)
        second, answer, cached = asked(engine, [*text, *questions[1]], f"{number}", NEW)
        _, alone, _ = asked(engine, [*text, *questions[1]], f"{number} alone", NEW)
        same &= answer == alone
        told(f"round {number}: {1e3 * first:.0f} ms, {1e3 * second:.0f} ms behind the same beginning")
        if number:  # what is compiled at first use is not measured
            found.append((first, second))
    firsts, seconds = ([1e3 * one for one in each] for each in zip(*found, strict=True))
    return {
        "tokens": tokens, "found": cached, "first_ms": median(firsts), "second_ms": median(seconds),
        "share": median(b / a for a, b in found), "same_text": same,
    }  # fmt: skip


def many(engine: Outrider, sequences: int, tokens: int) -> dict[str, Any]:
    """Each begins with another number, so that nothing is shared."""
    text, new = long_text(engine, tokens), 32
    before = resident()
    begun = time.perf_counter()
    prompts = [[*engine.encode(f"{number}:"), *text][: tokens - new] for number in range(sequences)]
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    handles = [engine.engine.submit(prompt, params) for prompt in prompts]
    running, peak, ended = 0, before, 0
    while engine.step():
        running, peak = max(running, len(engine.engine.running)), max(peak, resident())
        if (done := sum(handle.done for handle in handles)) // TOLD > ended // TOLD:
            told(f"{done} of {sequences} have ended, at most {peak / 2**30:.2f} GiB")
        ended = done
    lengths = [len(handle.result().token_ids) for handle in handles]
    return {
        "sequences": sequences, "tokens": tokens, "at_once": running, "before_gib": before / 2**30,
        "peak_gib": peak / 2**30, "seconds": time.perf_counter() - begun, "complete": lengths == [new] * sequences,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="native")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--method", default="plain")
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64, help="0: leave that part out")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--json", nargs="?", const="-")
    args = parser.parse_args()
    slots = max(1, args.sequences)
    with outrider.load(
        args.model, args.method, runtime=args.runtime, precision=args.precision, max_slots=slots
    ) as engine:
        out: dict[str, Any] = {"shared": shared_beginning(engine, args.shared, args.rounds)}
        if args.sequences:
            out["many"] = many(engine, args.sequences, args.tokens)
    if args.json:
        text = json.dumps(out, indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
        return
    one, console = out["shared"], Console()
    console.print(
        f"{one['found']} tokens of {one['tokens']} found: first token after {one['second_ms']:.0f} ms instead of "
        f"{one['first_ms']:.0f} ms, {100 * one['share']:.1f}%; same text: {one['same_text']}"
    )
    if args.sequences:
        every = out["many"]
        console.print(
            f"{every['sequences']} sequences of {every['tokens']} tokens, {every['at_once']} at once: at most "
            f"{every['peak_gib']:.2f} GiB, {every['before_gib']:.2f} before, in {every['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
