"""Suites: the prompts of a bench by name, by file, made up, or made from a text that the user points to.

`synthetic` and `built-in` need no data; `spec_bench` is the public set of six groups, from a file or fetched once; any
JSONL of prompts or chat turns is a suite; `long:TEXT` asks about ever longer stretches of a text and `traffic:TEXT`
asks about its parts again and again.
"""

from __future__ import annotations

import random
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from outrider.core.errors import InputError, UnknownName, did_you_mean
from outrider.core.files import write_atomic
from outrider.store.prompts import Prompt, built_in_prompts, read_prompts, read_text

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
TIMEOUT_S = 20
CHARACTERS_A_TOKEN = 4  # of English text, about; reports state the tokens that it came to
CONTEXTS = (256, 512, 1024, 2048, 4096)
PLACES = 4  # stretches of each length
PASSAGE = 1200  # characters of a passage of the traffic
ASKED = ("Summarize the passage in two sentences.", "List the names and numbers in the passage.",
         "Quote the most important sentence of the passage.")  # fmt: skip
VISITS = 3


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    prompts: list[Prompt]
    ordered: bool = False  # the order is part of the work: never shuffled


def find(spec: str) -> Suite:
    """`synthetic`, `built-in`, `spec_bench[:FILE]`, `long:FILE`, `traffic:FILE`, or the path of a JSONL file."""
    name, _, path = spec.partition(":")
    if name in NEED_NOTHING and not path:
        return Suite(name, NEED_NOTHING[name]())
    if name == "spec_bench":
        return Suite(name, read_prompts(path or _fetched()))
    if name in FROM_TEXT:
        if not path:
            raise InputError(f"the suite {name} is made from a text; name one, as in {name}:FILE.txt")
        return Suite(name, FROM_TEXT[name](read_text(path)), ordered=name == "traffic")
    if Path(spec).suffix in (".jsonl", ".json") or Path(spec).exists():
        return Suite(Path(spec).stem, read_prompts(spec))
    known = ", ".join([*NEED_NOTHING, "spec_bench[:FILE]", *(f"{n}:FILE" for n in FROM_TEXT), "FILE.jsonl"])
    hint = did_you_mean(name, [*NEED_NOTHING, "spec_bench", *FROM_TEXT])
    raise UnknownName(f"unknown suite {spec!r}; {hint}known suites: {known}")


def synthetic(count: int = 8, seed: int = 0) -> list[Prompt]:
    """Four kinds of work from a list of words: copying with a change, listing, counting on, and free writing."""
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        a, b, c, d = rng.sample(WORDS, 4)
        code = f"def total_{a}(items):\n    {a} = 0\n    for {b} in items:\n        {a} = {a} + {b}.{c}\n    return {a}"
        rows = "\n".join(f"{word}: {rng.randrange(10, 99)} {d}s" for word in rng.sample(WORDS, 8))
        start, step = rng.randrange(2, 30), rng.randrange(2, 9)
        asked = {
            "edit": f"Rename the variable `{a}` to `{d}` in this function and repeat it in full.\n\n{code}",
            "extract": f"Write these rows as a table with the columns name and amount.\n\n{rows}",
            "count": f"Count up from {start} in steps of {step}, one number a line, twenty numbers.",
            "write": f"Write a short story about a {a}, a {b} and a {c}.",
        }
        prompts += [Prompt(f"{kind}-{i}", (text,), category=kind) for kind, text in asked.items()]
    return prompts


def long_context(text: str) -> list[Prompt]:
    """A summary of ever longer stretches; a text that is too short for a length leaves it out."""
    prompts = []
    for tokens in CONTEXTS:
        size = tokens * CHARACTERS_A_TOKEN
        room = len(text) - size
        for place in range(PLACES if room > 0 else 0):
            start = room * place // max(PLACES - 1, 1)
            asked = f"Summarize the following text.\n\n{text[start : start + size]}"
            prompts.append(Prompt(f"context-{tokens}-{place}", (asked,), category=f"context-{tokens}"))
    if not prompts:
        raise InputError(f"the text has {len(text)} characters; a long-context suite needs more than {4 * CONTEXTS[0]}")
    return prompts


def traffic(text: str) -> list[Prompt]:
    """The same passages asked about in several visits, other questions between: what a memory could learn from."""
    passages = [text[i : i + PASSAGE] for i in range(0, len(text) - PASSAGE + 1, PASSAGE)][:8]
    if not passages:
        raise InputError(f"the text has {len(text)} characters; a traffic suite needs at least {PASSAGE}")
    return [
        Prompt(f"visit-{visit + 1}-{i}-{q}", (f"{question}\n\n{passage}",), category=f"visit-{visit + 1}")
        for visit in range(VISITS)
        for q, question in enumerate(ASKED)
        for i, passage in enumerate(passages)
    ]


def _fetched() -> Path:
    path = user_cache_path("outrider") / "bench" / "spec_bench.jsonl"
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(SPEC_BENCH, timeout=TIMEOUT_S) as answer:
            content = answer.read()
    except (OSError, urllib.error.URLError) as error:
        raise InputError(
            f"spec_bench could not be fetched ({error}); give its question.jsonl by path: --suite spec_bench:FILE"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)
    return path


NEED_NOTHING: dict[str, Callable[[], list[Prompt]]] = {"synthetic": synthetic, "built-in": built_in_prompts}
FROM_TEXT: dict[str, Callable[[str], list[Prompt]]] = {"long": long_context, "traffic": traffic}
WORDS = (
    "anchor basket candle drawer engine feather garden hammer island jacket kettle lantern marble needle orange "
    "pencil quarry ribbon saddle teapot umbrella violin window yarn zipper bridge castle desert forest glacier"
).split()
