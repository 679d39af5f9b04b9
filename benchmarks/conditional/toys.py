"""How many samples ASAp needs until its distribution is near the model's, given a language: one path, or whole trees.

    python benchmarks/conditional/toys.py --toys 60

Random languages over random models of three tokens, whose conditional distribution is computed exactly; the current
distribution is read off the bounds after every sample. Counted until its divergence is 1% of that of masking.
"""

from __future__ import annotations

import argparse
import json
import statistics

from outrider.check.toy import ToyLM
from outrider.constrain.asap import ASAp
from outrider.core.params import SamplingParams
from outrider.search.aligned import rounds
from tests.constrain.languages import PROMPT, conditional, current, divergence, language, random_texts, toy_engine

SHARE = 0.01
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=5)


def samples_needed(seed: int, drafted: bool, whole_trees: bool, good_draft: bool, limit: int) -> int:
    """Until the divergence is that share of masking's; `limit` where it was not reached."""
    lm, texts = ToyLM(3, seed=seed), random_texts(seed)
    automaton, learner, wanted = language(texts, 3), ASAp(whole_trees), conditional(lm, texts)
    first = divergence(wanted, current(lm, automaton, learner, texts))
    if first < 1e-6:
        return 0
    engine = toy_engine(lm, drafted, lm if good_draft else None)
    params = PARAMS.with_(seed=seed)
    for one in rounds(engine, PROMPT, params, [automaton], learner, limit):
        if divergence(wanted, current(lm, automaton, learner, texts)) <= SHARE * first:
            return one.number + 1
    return limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toys", type=int, default=60)
    parser.add_argument("--limit", type=int, default=400)
    asked = parser.parse_args()
    found: dict[str, list[int]] = {}
    kinds = {
        "path": (False, False, False),
        "whole trees, other draft": (True, True, False),
        "whole trees, target's draft": (True, True, True),
    }
    for name, (drafted, whole, good) in kinds.items():
        needed = [samples_needed(seed, drafted, whole, good, asked.limit) for seed in range(asked.toys)]
        found[name] = [count for count in needed if count]
    for name, counts in found.items():
        print(
            json.dumps({"kind": name, "toys": len(counts), "median": statistics.median(counts),
                        "mean": statistics.mean(counts), "at_limit": sum(c == asked.limit for c in counts)})
        )  # fmt: skip


if __name__ == "__main__":
    main()
