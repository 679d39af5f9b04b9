"""A file of prompts, one a line, answered together: rows of many texts share each pass of the model.

Run: python examples/batch_over_a_file.py PROMPTS.txt ANSWERS.jsonl
     (without names: a few built-in prompts, to the screen; `outrider batch` resumes after a kill, too)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import outrider

PROMPTS = ["Name three rivers.", "What is 7 times 8?", "Write one line about the sea.", "Translate to French: house"]


def main(source: str = "", target: str = "") -> None:
    prompts = Path(source).read_text(encoding="utf-8").splitlines() if source else PROMPTS
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts if prompt.strip()]
    with outrider.load("smollm2", max_slots=16) as engine:
        began = time.perf_counter()
        answers = engine.generate(messages, max_new_tokens=48)
        seconds = time.perf_counter() - began
    lines = [
        json.dumps({"prompt": asked[0]["content"], "answer": answer.text, "ended by": answer.finish_reason})
        for asked, answer in zip(messages, answers, strict=True)
    ]
    (Path(target).write_text if target else sys.stdout.write)("\n".join(lines) + "\n")
    tokens = sum(answer.stats.new_tokens for answer in answers)
    print(f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s",
          file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:3])
