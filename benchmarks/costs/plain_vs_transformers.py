"""Plain decoding through Outrider against transformers' own `generate`, interleaved prompt by prompt, greedy.

A ratio above 1 means that Outrider's loop is the faster one. Each runtime has a copy of the model of its own.
Run: python benchmarks/costs/plain_vs_transformers.py [--limit N] [--rounds N] [--json [FILE]]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import arguments, give, loaded, measure, run
from outrider.bench.contenders import Contender, Run, method_contender, parse_specs
from outrider.core.generation import Stats
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel, load_model


class FirstToken:
    """A streamer that only looks at the clock: the prompt comes first, then each token."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def run_transformers(other: LoadedModel, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
    """The prefill brings the first token here, so decoding makes one less."""
    (prompt,) = prompts
    ids = torch.tensor([prompt], device=other.device)
    first = FirstToken()
    begun = time.perf_counter()
    with torch.inference_mode():
        out = other.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=params.max_new_tokens,
            pad_token_id=0, streamer=first,
        )  # fmt: skip
    ended = time.perf_counter()
    tokens = tuple(out[0, len(prompt) :].tolist())
    stats = Stats("transformers", prompt_tokens=len(prompt), new_tokens=len(tokens), steps=len(tokens))
    stats.first_token_s, stats.verify_s = first.at - begun, ended - first.at
    return Run((tokens,), ("",), stats, len(tokens), ended - begun, decoded=len(tokens) - 1)


def main() -> None:
    args = arguments(__doc__, max_new_tokens=128).parse_args()
    with loaded(args) as (engine, prompts):
        other = load_model(args.model, device=args.device, dtype=args.dtype)
        (spec,) = parse_specs("plain")
        theirs = Contender("transformers", "generate", lambda: lambda ids, params: run_transformers(other, ids, params))
        out = measure(args, engine, prompts, [method_contender(engine, spec), theirs])
    figures = out["methods"][1]
    ratios = {name: 1 / figures[key] for name, key in
              (("decode", "speedup"), ("decode_median", "speedup_median"), ("total", "speedup_total"))}  # fmt: skip
    lines = [f"Outrider's plain decoding / transformers' generate, {name}: {r:.3f}x" for name, r in ratios.items()]
    give(args, {"ratios": ratios, **out}, lines, out)


if __name__ == "__main__":
    run(main)
