"""Best of n: samples of one prompt share their passes, and a reward picks; here, who uses most of the words asked for.

Run: python examples/best_of_n.py [WORD ...]
"""

from __future__ import annotations

import re
import sys

import outrider

WORDS, SAMPLES = ["rain", "window", "cat", "warm"], 8


def reward(text: str, words: list[str]) -> float:
    """Words that are there; of two texts with as many the shorter one is better."""
    return len(set(words) & set(re.findall(r"\w+", text.lower()))) - len(text) / 1000


def main(words: list[str]) -> None:
    asked = [{"role": "user", "content": f"Write one sentence with the words {', '.join(words)}."}]
    with outrider.load("smollm2") as engine:
        samples = engine.generate([asked], n=SAMPLES, temperature=0.9, seed=1, max_new_tokens=40)
    ranked = sorted(samples, key=lambda sample: reward(sample.text, words), reverse=True)
    for sample in ranked:
        print(f"{reward(sample.text, words):6.2f}  {sample.text!r}")
    best = ranked[0]
    print(f"\n{best.text}\n\nseed {best.seed}, sample {best.sample}: the same text every time, with any method")


if __name__ == "__main__":
    main(sys.argv[1:] or WORDS)
