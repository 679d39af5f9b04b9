"""Systems with planted timings: what a runner makes of them is known to the digit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.bench.contenders import Contender, Run
from outrider.core.generation import Stats
from outrider.core.params import SamplingParams

PREFILL_S = 5.0

Pace = Callable[[Sequence[list[int]]], float]  # seconds a token for these prompts


def system(
    label: str, pace: float | Pace, *, runtime: str = "outrider", baseline: str = "plain", tokens: int = 10,
    accepted: float = 1.0, said: int = 0, on_run: Callable[[str], None] | None = None, **facts: Any,
) -> Contender:  # fmt: skip
    """Answers every prompt with `tokens` tokens of id `said`, at so many seconds a token; no clock is involved."""

    def run(prompts: Sequence[list[int]], params: SamplingParams) -> Run:
        if on_run:
            on_run(label)
        each = pace(prompts) if callable(pace) else pace
        count = min(tokens, params.max_new_tokens)
        new = count * len(prompts)
        stats = Stats(label, new_tokens=new, steps=round(new / accepted), first_token_s=PREFILL_S)
        stats.verify_s = each * new
        outputs = tuple((said,) * count for _ in prompts)
        return Run(outputs, ("a" * count,) * len(prompts), stats, stats.steps, PREFILL_S + each * new, new)

    return Contender(label, label, lambda: run, runtime=runtime, baseline=baseline, facts=facts)
