"""Greedy text of a method that learns, held against plain decoding: what tests of such drafters share."""

from __future__ import annotations

from outrider.api import Outrider
from outrider.core.generation import Generation
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe

PROMPTS = [[1, 5, 9, 5, 9], [7, 7, 7], [3]]
PARAMS = SamplingParams(max_new_tokens=32)


def as_plain(engine: Outrider, recipe: Recipe, batch: bool = True) -> list[Generation]:
    """The answers to PROMPTS, in one batch or one after another; fails where a text is not that of plain decoding."""
    plain = [engine.engine.submit(p, PARAMS, engine.recipe("plain")).result().token_ids for p in PROMPTS]
    if batch:
        handles = [engine.engine.submit(p, PARAMS, recipe) for p in PROMPTS]
        made = [handle.result() for handle in handles]
    else:
        made = [engine.engine.submit(p, PARAMS, recipe).result() for p in PROMPTS]
    assert [generation.token_ids for generation in made] == plain
    return made
