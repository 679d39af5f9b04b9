"""Random JSON schemas: whatever a model says under one, a text that has ended is JSON that the schema accepts."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import pytest

from outrider.check.toy import ToyLM, ToyTarget
from outrider.constrain.grammar import Grammars
from outrider.control.fixed import Fixed
from outrider.core.engine import Engine
from outrider.core.protocols import Recipe
from outrider.core.records import Budget
from outrider.core.sampling import SamplingParams
from outrider.draft.lookup.jump_forward import JumpForward
from outrider.verify.invariant import Invariant
from tests.constrain.words import SIZE, WORDS

NAMES = ("name", "age", "a b", "é", 'say "x"', "ok")
ENDING = {WORDS.pieces.index(sign): 5.0 for sign in (b'"', b"}", b"]", b'"}')}  # else strings of random bytes go on
ENDING |= {WORDS.pieces.index(bytes([byte])): -30.0 for byte in (*range(128, 256), 92)}  # no text, and escapes


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    kind = rng.choice(kinds + (["object", "object", "array", "anyOf"] if depth < 3 else []))
    inner = lambda: schema(rng, depth + 1)  # noqa: E731
    if kind == "object":
        properties = {name: inner() for name in rng.sample(NAMES, rng.randrange(1, 4))}
        required = [name for name in properties if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(rng.randrange(1, 4))]}
    if kind == "enum":
        return {"enum": rng.sample([1, 2.5, "x", "y z", True, None, "ü"], 3)}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, False])}
    if kind == "integer" and rng.random() < 0.5:
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "string" and rng.random() < 0.7:
        low = rng.randrange(4)
        return rng.choice(
            [
                {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)},
                {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^\\d{2}-\\d{2}$", "^(yes|no)$"])},
            ]
        )
    return {"type": kind}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_whatever_has_ended_is_what_the_schema_accepts(backend: str, count: int) -> None:
    rng = random.Random(7)
    grammars = Grammars(lambda: WORDS, SIZE, backend)
    recipe = Recipe("toy", JumpForward(), Invariant(), Fixed(Budget(12, 12)))
    target = ToyTarget(ToyLM(SIZE, seed=1, order=1), slots=1, max_context=400)
    engine = Engine(target, recipe, eos_ids={0}, decode=WORDS.decode, strict=True, compile_form=grammars)
    ends: Counter[str] = Counter()
    for number in range(count):
        asked = schema(rng)
        params = SamplingParams(
            json_schema=asked, temperature=1.0, seed=number, max_new_tokens=200, logit_bias=ENDING,
            free_spacing=number % 4 == 0,
        )  # fmt: skip
        made = engine.submit([1], params).result()
        ends[made.finish_reason] += 1
        if made.finish_reason == "eos":
            jsonschema.validate(json.loads(made.text), asked)
        else:
            assert made.finish_reason == "length"
    assert ends["eos"] > 0.8 * count, ends
