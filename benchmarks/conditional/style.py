"""What a style prior does to a model's text: by strength, how near it comes to the style and what it costs in fluency.

Every prompt is answered at each strength. Three measures an emitted token: perplexity under the unchanged model; under
an n-gram model of texts of the same kind that the prior has NOT seen, since its own corpus would flatter it; and the
Jensen-Shannon divergence between the model's distribution and the changed one. Also what the prior costs a row of
logits.
Run: python benchmarks/conditional/style.py --style FILE_OR_FOLDER --held-out FILE_OR_FOLDER [--json [FILE]]
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import arguments, give, loaded, run
from outrider.api import Outrider
from outrider.check.reference import Plain
from outrider.constrain.style import Style
from outrider.core.params import SamplingParams


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    middle = (p + q) / 2
    return float(sum((a * (a.clamp_min(1e-30) / middle.clamp_min(1e-30)).log()).sum() / 2 for a in (p, q)))


def judge(engine: Outrider, style: Style, yardstick: Style, prompt: list[int], answer: list[int]) -> dict[str, float]:
    """Sums over the answer's tokens."""
    rows = Plain(engine.loaded.model, engine.target.vocab_size).rows(prompt, answer).float().cpu()
    base = held_out = moved = 0.0
    for i, token in enumerate(answer):
        before = np.array([*prompt, *answer[:i]])
        base -= float(rows[i].log_softmax(0)[token])
        held_out -= float(yardstick.bias(before).log_softmax(0)[token])
        moved += divergence(rows[i].softmax(0), style.reshape(before, rows[i]).softmax(0))
    return {"tokens": len(answer), "base": base, "held_out": held_out, "moved": moved}


def cost(style: Style, tokens: np.ndarray, repeats: int = 200) -> float:
    row, times = torch.randn(style.vocab_size), []
    for i in range(repeats):
        begun = time.perf_counter()
        style.reshape(tokens[: 2 + i % (len(tokens) - 2)], row)
        times.append(time.perf_counter() - begun)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=64)
    parser.add_argument("--style", required=True, metavar="PATH", help="text of the style")
    parser.add_argument("--held-out", required=True, metavar="PATH", help="other text of the same kind, to measure by")
    parser.add_argument("--strengths", default="0,0.05,0.1,0.2,0.5,1")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    with loaded(args) as (engine, prompts):
        yardstick = engine.style(args.held_out, 1.0)
        encoded = [engine.encode_chat(prompt.conversation()) for prompt in prompts]
        params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1)
        for strength in map(float, args.strengths.split(",")):
            style = engine.style(args.style, strength)
            made = engine.generate(encoded, params, constraint=style)
            answers = [[t for t in g.token_ids if t not in style.special] for g in made]
            judged = [judge(engine, style, yardstick, p, a) for p, a in zip(encoded, answers, strict=True)]
            total = {name: sum(one[name] for one in judged) for name in judged[0]}
            table.append({
                "strength": strength, "tokens": total["tokens"],
                "base_perplexity": math.exp(total["base"] / total["tokens"]),
                "held_out_perplexity": math.exp(total["held_out"] / total["tokens"]),
                "divergence": total["moved"] / total["tokens"],
                "row_us": cost(style, np.array(encoded[0] + answers[0])),
                "first": made[0].text[:200],
            })  # fmt: skip
        sizes = f"style {style.tokens} tokens, held out {yardstick.tokens} tokens, temperature {args.temperature}"
    lines = [sizes, f"{'strength':>8}{'tokens':>8}{'base ppl':>10}{'held-out ppl':>14}{'JS, nats':>10}{'us a row':>10}"]
    for row in table:
        figures = f"{row['base_perplexity']:>10.2f}{row['held_out_perplexity']:>14.1f}{row['divergence']:>10.4f}"
        lines.append(f"{row['strength']:>8}{row['tokens']:>8}{figures}{row['row_us']:>10}")
    lines += [f"{row['strength']}: {row['first']!r}" for row in table]
    give(args, {"setting": sizes, "strengths": table}, lines)


if __name__ == "__main__":
    run(main)
