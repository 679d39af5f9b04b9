"""Predicates beside masks on a real model: the same texts with equal seeds, and how often a predicate is asked.

    PYTHONPATH=. python benchmarks/conditional/predicates.py --model smollm2 --runs 200

JSON of a schema, compiled to an automaton: once as a mask, once asked about single tokens in the order of the target's
noise; and the same texts with a drafter. Then JSON without a grammar, by a Python function over the text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import outrider
from outrider.constrain.predicate.checked import Checked
from outrider.constrain.predicate.stepwise import Stepwise
from outrider.core.params import SamplingParams
from tests.constrain.predicate import json_prefix

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}
PROMPTS = [
    "Describe a person as JSON with name, age and city.",
    "Invent a sailor. Answer with one JSON object: name, age, city.",
    "Anna, 34, lives in Lisbon. Write that as JSON with name, age and city.",
    "Give me one JSON object about a famous painter: name, age, city.",
    "Write a JSON object with the name, age and city of somebody from Japan.",
]
SAMPLES = 8


def measure(engine: outrider.Outrider, runs: int, tokens: int, canonical: bool) -> Iterator[dict[str, object]]:
    """The figures so far, after each prompt."""
    base = SamplingParams(temperature=1.0, max_new_tokens=tokens, n=SAMPLES)
    ends = engine.loaded.eos_ids
    same = drafted = done = calls = asked = text_calls = text_asked = 0
    seconds = {"mask": 0.0, "asked": 0.0, "function": 0.0}
    automaton = engine.compile_form(base.with_(json_schema=SCHEMA, free_spacing=not canonical))
    for number in range(runs // SAMPLES):
        ids = engine.encode_chat(PROMPTS[number % len(PROMPTS)])
        params = base.with_(seed=number)
        begun = time.perf_counter()
        masked = [g.token_ids for g in engine.generate([ids], params, constraint=automaton)]
        seconds["mask"] += time.perf_counter() - begun
        predicate = Stepwise(automaton, ids, ends)
        begun = time.perf_counter()
        found = [g.token_ids for g in engine.generate([ids], params, constraint=predicate)]
        seconds["asked"] += time.perf_counter() - begun
        calls, asked = calls + predicate.calls, asked + predicate.asked
        again = Stepwise(automaton, ids, ends)
        by_draft = [g.token_ids for g in engine.generate([ids], params, method="mix", constraint=again)]
        same += sum(one == other for one, other in zip(masked, found, strict=True))
        drafted += sum(one == other for one, other in zip(masked, by_draft, strict=True))
        done += len(masked)
        if number < len(PROMPTS):
            function = Checked.of(json_prefix.viable, engine.tokenizer, ends, json_prefix.complete)
            begun = time.perf_counter()
            engine.generate([ids], params.with_(n=2), constraint=function)
            seconds["function"] += time.perf_counter() - begun
            text_calls, text_asked = text_calls + function.calls, text_asked + function.asked
            function.close()
        yield {
            "runs": done, "same as the mask": same, "same with mix": drafted, "calls a token": calls / asked,
            "calls a token, function over the text": text_calls / text_asked, "tokens": asked,
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--canonical", action="store_true", help="no white space that is not needed")
    asked = parser.parse_args()
    for name in asked.model or ["smollm2"]:
        with outrider.load(
            name, method="plain", runtime=asked.runtime, precision=asked.precision, max_slots=SAMPLES, max_context=512
        ) as engine:
            for figures in measure(engine, asked.runs, asked.tokens, asked.canonical):
                print(json.dumps({"model": Path(name).name, **figures}), flush=True)


if __name__ == "__main__":
    main()
