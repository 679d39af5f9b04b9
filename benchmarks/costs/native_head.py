"""A step of the runtime native in float32 with all logits and with the largest of each row alone, by rows.

Rows are a stretch of real text behind a context, in interleaved rounds. Also how many products of a row were taken from
the weights themselves. Stops where the largest logit of any row is not the same.
Run: python benchmarks/costs/native_head.py [--prompts FILE] [--rows 1,2,4,8] [--rounds 15] [--context 300] [--json]
"""

from __future__ import annotations

import argparse
import time
from itertools import chain
from statistics import median

import numpy as np
from rows import give_rows

import outrider
from outrider.core.records import GREEDY, NO_NEEDS, Piece
from outrider.core.schedule import run_all
from outrider.core.tree import fixed
from outrider.store.prompts import built_in_prompts, read_prompts


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
    sizes = [int(number) for number in options.rows.split(",")]
    found = []
    with outrider.load(options.model, method="plain", runtime="native", precision="float32", max_slots=1) as engine:
        target = engine.engine.target
        text = list(chain.from_iterable(engine.encode_chat(p.conversation()) for p in prompts))
        if len(text) < options.context + max(sizes):
            parser.error(f"the prompts have {len(text)} tokens; give more of them, or a shorter context")
        slot = target.acquire()
        run_all(target, [(slot, text[: options.context])])
        for rows in sizes:
            tree = fixed(np.array(text[options.context : options.context + rows]), np.arange(rows) - 1)
            times: dict[str, list[float]] = {"all": [], "largest": []}
            for round_ in range(-2, options.rounds):
                answers = []
                for name, needs in (("all", NO_NEEDS), ("largest", GREEDY)):
                    begun = time.perf_counter()
                    answers.append(target.run([Piece(slot, tree=tree)], needs)[0].logits)
                    if round_ >= 0:
                        times[name].append(1e3 * (time.perf_counter() - begun))
                full, screened = (answer.numpy() for answer in answers)
                assert (full.argmax(1) == screened.argmax(1)).all(), "the largest logit is another one"
            twice = float((full == screened).sum(1).mean())
            found.append({"rows": rows, **{name: median(taken) for name, taken in times.items()}, "exact": twice})
    heading = "rows     all  largest  (milliseconds)   exact products of a row"
    give_rows(found, options.json, heading, "{rows:4} {all:7.2f} {largest:8.2f} {exact:18.1f}")


if __name__ == "__main__":
    main()
