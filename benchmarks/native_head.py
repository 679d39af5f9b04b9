"""A step of the runtime native in float32 with all logits and with the largest of each row alone, by rows.

Rows are a stretch of real text behind a context, in interleaved rounds. Also how many products of a row were taken from
the weights themselves. Stops where the largest logit of any row is not the same.
Run: python benchmarks/native_head.py [--prompts FILE] [--rows 1,2,4,8] [--rounds 15] [--context 300] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import chain
from statistics import median

import numpy as np

import outrider
from outrider.prompts import built_in_prompts, read_prompts
from outrider.protocols import GREEDY, NO_NEEDS
from outrider.tree import fixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL; the built-in prompts without it")
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts) if options.prompts else built_in_prompts()
    sizes = [int(own) for own in options.rows.split(",")]
    found = []
    with outrider.load(options.model, method="plain", runtime="native", precision="float32", max_slots=1) as engine:
        target = engine.engine.target
        text = list(chain.from_iterable(engine.encode_chat(p.conversation()) for p in prompts))
        if len(text) < options.context + max(sizes):
            parser.error(f"the prompts have {len(text)} tokens; give more of them, or a shorter context")
        slot = target.acquire()
        for _ in target.prefill([slot], [text[: options.context + 1]], NO_NEEDS):
            pass
        for rows in sizes:
            tree = fixed(np.array(text[options.context : options.context + rows]), np.arange(rows) - 1)
            times: dict[str, list[float]] = {"all": [], "largest": []}
            for round_ in range(-2, options.rounds):
                answers = []
                for name, needs in (("all", NO_NEEDS), ("largest", GREEDY)):
                    begun = time.perf_counter()
                    answers.append(target.verify([slot], [tree], needs)[0].logits)
                    if round_ >= 0:
                        times[name].append(1e3 * (time.perf_counter() - begun))
                full, screened = (own.numpy() for own in answers)
                assert (full.argmax(1) == screened.argmax(1)).all(), "the largest logit is another one"
            twice = float((full == screened).sum(1).mean())
            found.append({"rows": rows, **{name: median(own) for name, own in times.items()}, "exact": twice})
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print("rows     all  largest  (milliseconds)   exact products of a row")
    for own in found:
        print(f"{own['rows']:4} {own['all']:7.2f} {own['largest']:8.2f} {own['exact']:18.1f}")


if __name__ == "__main__":
    main()
