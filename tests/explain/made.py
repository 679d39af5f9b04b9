"""Generations that no model made: of any length, with trees, for pages and documents."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from outrider.core.generation import FinishReason, Generation, Origin, Stats
from outrider.core.records import Budget, StepTiming
from outrider.core.trace.trace import Reason, StepCurve, Trace, TracedStep

WORDS = ["The", " rain", " fälls", ".", " <b>&amp;", "\n", " on", " the", " plain", "</script>", " 🙂", " again"]
DRAFTERS = ("suffix", "eagle3", "prompt-lookup")


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i % len(WORDS)] for i in ids)


def made(steps: int = 12, gain: int = 3, width: int = 3, seed: int = 1) -> Generation:
    """Every step has a path of up to `gain` - 1 candidates, with `width` - 1 others beside each of them."""
    rng, trace, origins, ids = random.Random(seed), Trace(), [], []
    stats = Stats(method="mix", prompt_tokens=9, first_token_s=0.02)
    at = 0.0
    trace.curves.append(StepCurve(0, 1, np.linspace(0.02, 0.05, 33, dtype=np.float32)))
    for number in range(steps):
        depth = rng.randrange(gain)
        tokens, parents, names = [rng.randrange(99)], [-1], [""]
        path: list[int] = []
        for level in range(depth + 1):  # one level more than is accepted
            above = path[-1] if path else 0
            first = len(tokens)
            tokens += rng.sample(range(99), width)
            parents += [above] * width
            names += [rng.choice(DRAFTERS) for _ in range(width)]
            if level < depth:
                path.append(first + rng.randrange(width))
        tokens.append(rng.randrange(99))  # behind a rejected candidate
        parents.append(len(parents) - 1)
        names.append(DRAFTERS[0])
        emitted = (*(tokens[node] for node in path), 99 + rng.randrange(9))
        timing = StepTiming(0.004 * rng.random(), 0.02 + 0.01 * rng.random(), 0.001, len(tokens), 1, context=50)
        at += timing.total
        seen = {0, *path}
        trace.steps.append(
            TracedStep(
                len(ids), np.array(tokens, np.int32), np.array(parents, np.int16), tuple(names),
                np.full(len(tokens), 0.4, np.float32), tuple(path), emitted, Budget(32, 8), Budget(255, 90),
                len(tokens) + 3, Reason.CUT, timing, 9 + len(ids), 0.03, 0.02, at,
            )
        )  # fmt: skip
        chances = np.array([0.3 if parent in seen else np.nan for parent in parents], np.float32)
        trace._chances.append((chances, np.full(len(emitted), 0.7, np.float32)))
        origins += [Origin(names[node], level) for level, node in enumerate(path, 1)] + [Origin("", 0)]
        ids += emitted
        stats.steps, stats.new_tokens = number + 1, len(ids)
        stats.drafted += len(tokens) - 1
        stats.accepted += len(path)
        stats.draft_s, stats.verify_s = stats.draft_s + timing.draft, stats.verify_s + timing.verify
    return Generation(decode(ids), ids, FinishReason.LENGTH, 3, 0, stats, origins, trace=trace)


def plain_of(generation: Generation, differs_at: int | None = None) -> Generation:
    """The same tokens one by one, or others from some place on."""
    trace, ids = Trace(), list(generation.token_ids)
    if differs_at is not None:
        ids[differs_at:] = [token + 1 for token in ids[differs_at:]]
    for number, token in enumerate(ids):
        one = np.zeros(1, np.int32)
        trace.steps.append(
            TracedStep(
                number, one, one.astype(np.int16) - 1, (), None, (), (token,), Budget(0, 0), Budget(255, 90), 0,
                Reason.PLAIN, StepTiming(0.0, 0.02, 0.001, 1, 1), 9 + number, None, None, 0.021 * (number + 1),
            )
        )  # fmt: skip
        trace._chances.append((np.full(1, np.nan, np.float32), np.ones(1, np.float32)))
    stats = Stats(method="plain", prompt_tokens=9, new_tokens=len(ids), steps=len(ids), verify_s=0.02 * len(ids))
    return Generation(decode(ids), ids, FinishReason.LENGTH, 3, 0, stats, [Origin("", 0)] * len(ids), trace=trace)
