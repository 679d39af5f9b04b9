"""Train a drafter and use it: the model writes text, small heads learn to run ahead of it, and a method drafts by them.

Run: python examples/train_a_drafter.py [folder]
     (ten minutes of training on a GPU make a good one; this is a taste: a few minutes on two cores)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import outrider
from outrider.models import load_model
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.text.selfdata import DataPlan, write_data

PLAN = {"steps": 40, "batch": 4, "held_out": 8, "heads": 2, "vocab": 4096}


def main(folder: str) -> None:
    target = load_model("smollm2", device="cpu")
    text = write_data(target, DataPlan(tokens=3072, length=96, batch=16, about_every=0), Path(folder, "text"))
    print(f"{text.tokens.numel()} tokens of text, {text.answer_tokens} of them answers")
    drafter = Path(folder, "hydra")
    _, curve = train_drafter("hydra", target, text, plan_of(find_kind("hydra"), PLAN), drafter)
    print(f"guesses right on text it never saw: {curve[0].greedy:.0%} untrained, {curve[-1].greedy:.0%} trained")

    with outrider.load("smollm2", "hydra", options={"drafter": str(drafter), "controller": "fixed"}) as engine:
        drafted = engine.chat("Name three colours.", max_new_tokens=64)
        plain = engine.chat("Name three colours.", method="plain", max_new_tokens=64)
    print(drafted.text)
    print(f"the same text as plain decoding: {drafted.text == plain.text}, in {drafted.stats.steps} passes "
          f"instead of {plain.stats.steps}")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
