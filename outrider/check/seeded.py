"""The seeded part: at equal seeds a drafter-invariant rule gives plain decoding's tokens at any temperature.

Across drafters (the method's, none, forced ones), one by one and in shuffled ragged batches, with truncations,
penalties and bans among the settings. A rule coupled to the draft has no such identity; the martingale part tests it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.check.greedy import add_forced
from outrider.check.reference import Answer, Job, Watch
from outrider.check.runs import FORCED, Subject, one_by_one, shortened, together, told
from outrider.check.ties import Comparison
from outrider.core.params import SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.8": {"temperature": 0.8},
    "top-k 20": {"temperature": 1.0, "top_k": 20},
    "top-p 0.9, min-p 0.02": {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.15, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    },
    "top-p 0.8, bias, bad words": {
        "temperature": 1.2, "top_p": 0.8, "logit_bias": {5: 1.5, 7: -2.0}, "bad_words": ((11,), (13, 17), (3, 4, 5)),
    },
}  # fmt: skip


def seeded_jobs(prompts: Sequence[tuple[str, tuple[int, ...]]], count: int, tokens: int, seed: int) -> list[Job]:
    """Every setting in turn, with the prompts in turn."""
    jobs = []
    for i in range(count):
        setting = list(SETTINGS)[i % len(SETTINGS)]
        name, prompt = prompts[i % len(prompts)]
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=seed + i, **SETTINGS[setting])
        jobs.append(Job(f"{name}, {setting}, seed {params.seed}", prompt, params))
    return jobs


def run_seeded(
    comparison: Comparison, subject: Subject, answers: Sequence[Answer], forced_tokens: int, watch: Watch
) -> None:
    """Changes `comparison`: one run after the other is added to it."""
    engine = subject.engine
    wanted = [(a, a.tokens) for a in answers]
    made = one_by_one(engine, [(a.job, subject.speculating()) for a in answers], "always speculating", watch)
    comparison.add("method, one by one", wanted, *told(made))
    batch = list(zip(answers, shortened(answers, len(answers[0].tokens)), strict=True))
    batch = batch[1::2] + batch[::2]
    wanted = [(a, want) for a, (_, want) in batch]
    made = together(engine, [(job, subject.recipe) for _, (job, _) in batch], "shuffled batch", watch)
    comparison.add("method as configured, shuffled ragged batch", wanted, *told(made))
    if subject.speculates:
        made = together(
            engine, [(job, subject.plain_decoding()) for _, (job, _) in batch], "no speculation, batch", watch
        )
        comparison.add("no speculation, ragged batch", wanted, *told(made))
    add_forced(comparison, subject, answers, forced_tokens, FORCED[:2], watch)
