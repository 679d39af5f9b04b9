"""The greedy part: the method's tokens against plain decoding's, on a real model, at temperature 0.

Runs the method one prompt at a time and in a ragged batch, as configured and always speculating, then its rule on
forced trees. Every third text also has penalties, which move the argmax by each node's own path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outrider.check.reference import Answer, Job, Watch
from outrider.check.runs import FORCED, Subject, one_by_one, shortened, together, told
from outrider.check.ties import FORCED_TREES, Comparison
from outrider.core.params import SamplingArguments, SamplingParams
from outrider.core.protocols import Recipe

PENALTIES: SamplingArguments = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}


def greedy_jobs(prompts: Sequence[tuple[str, tuple[int, ...]]], tokens: int) -> list[Job]:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=0)
    return [
        Job(name, prompt, params.with_(**PENALTIES) if i % 3 == 2 else params)
        for i, (name, prompt) in enumerate(prompts)
    ]


def run_greedy(
    comparison: Comparison, subject: Subject, answers: Sequence[Answer], forced_tokens: int, watch: Watch
) -> None:
    """Changes `comparison`: one run after the other is added to it."""
    engine, recipe = subject.engine, subject.recipe
    ending = [(dataclasses.replace(a.job, params=a.job.params.with_(ignore_eos=False)), a) for a in answers]
    made = together(engine, [(job, recipe) for job, _ in ending], "as configured, batch", watch)
    wanted = [(a, until_end(a.tokens, engine.eos_ids)) for _, a in ending]
    comparison.add("method as configured, ragged batch", wanted, *told(made))

    if subject.speculates:
        alone = shortened(answers, forced_tokens)
        made = one_by_one(engine, [(job, subject.speculating()) for job, _ in alone], "always speculating", watch)
        wanted = [(a, want) for a, (_, want) in zip(answers, alone, strict=True)]
        comparison.add("method always speculating, one by one", wanted, *told(made))
        batch = shortened(answers, len(answers[0].tokens))
        made = together(engine, [(job, subject.speculating()) for job, _ in batch], "always speculating, batch", watch)
        wanted = [(a, want) for a, (_, want) in zip(answers, batch, strict=True)]
        comparison.add("method always speculating, ragged batch", wanted, *told(made))

    add_forced(comparison, subject, answers, forced_tokens, FORCED, watch)


def add_forced(
    comparison: Comparison, subject: Subject, answers: Sequence[Answer], tokens: int,
    kinds: Sequence[tuple[str, float, int]], watch: Watch,
) -> None:  # fmt: skip
    """The method's rule on trees of the gate's own, in ragged batches in shuffled order."""
    for kind, accept, decoys in kinds:
        batch = list(zip(answers, shortened(answers, tokens), strict=True))[::-1]
        pairs: list[tuple[Job, Recipe]] = [(job, subject.forced(a, accept, decoys)) for a, (job, _) in batch]
        made = together(subject.engine, pairs, f"forced drafter, {kind}", watch)
        wanted = [(a, want) for a, (_, want) in batch]
        comparison.add(f"{FORCED_TREES} {kind} trees", wanted, *told(made))


def until_end(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """Where plain decoding would have stopped."""
    ends = [i for i, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens
