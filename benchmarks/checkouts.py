"""Two checkouts of Outrider against each other: is the newer one as fast?

Each runs in a process of its own and answers the same prompts; prompt by prompt they take turns, the other one first in
every second round, so that a busy machine hits both. Only the public API is used, so that old checkouts run, too.
Run: python benchmarks/checkouts.py BEFORE AFTER --prompts FILE.jsonl [--runtime native] [--precision int8,float32]
     [--method mix] [--set scope=private] [--limit N] [--rounds 3] [--max-new-tokens 96] [--json [FILE]]
     [--shape 8b --device cuda --dtype bfloat16]: widened in memory, with the drafter of the model itself
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

WORKER = """
import json, sys
import outrider
setting = json.loads(sys.argv[1])
rest = {"runtime": setting["runtime"], "precision": setting["precision"], "max_slots": 1, "max_context": 2048}
if setting["shape"]:
    from outrider.bench.inflate import inflate, parse_shape
    from outrider.models import load_model
    from outrider.models.drafts import shipped_draft
    try:
        from outrider.models.trained import load_eagle3
    except ImportError:  # an earlier layout
        from outrider.recipes.trained import load_eagle3
    loaded = load_model(setting["model"], device=setting["device"], dtype=setting["dtype"])
    model = inflate(loaded.model, parse_shape(setting["shape"], loaded.model.config))
    engine = outrider.load(model, "plain", tokenizer=loaded.tokenizer, **rest)
    engine._parts.drafts[("eagle3", "")] = load_eagle3(shipped_draft(loaded, "eagle3"), loaded)
    engine._recipes[setting["method"]] = engine._build(setting["method"], setting["options"])
else:
    engine = outrider.load(setting["model"], setting["method"], options=setting["options"], **rest)
acquire = engine.target.acquire
engine.target.acquire = lambda *_: acquire()  # a prompt that was met before runs whole, too, as in earlier checkouts
for line in sys.stdin:
    asked = json.loads(line)
    out = engine.chat(asked["prompt"], method=asked["method"], max_new_tokens=asked["tokens"])
    answer = {"ids": list(out.token_ids), "seconds": out.stats.decode_s, "steps": out.stats.steps}
    print("answer " + json.dumps(answer), flush=True)
"""


class Checkout:
    """One process that answers."""

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(setting)], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def answer(self, prompt: str, method: str, tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "method": method, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"a checkout ended with status {self.process.wait()}; its error is above")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `turns` or `prompt`")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="native")
    parser.add_argument("--precision", default="int8,float32", help="one or several; empty: as the model has it")
    parser.add_argument("--shape", help="widen the model in memory, such as 8b")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--method", default="mix", help="beside plain decoding")
    parser.add_argument(
        "--set", action="append", metavar="OPTION=VALUE", help="of the method; scope=private without it"
    )
    parser.add_argument("--limit", type=int, default=1, help="prompts of each group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", nargs="?", const="-")
    args = parser.parse_args()
    prompts = read(args.prompts, args.limit)
    rows = []
    for precision in args.precision.split(","):
        rows += compare(args, precision, prompts)
    if args.json == "-":
        print(json.dumps({"rows": rows}, indent=2))
        return
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")
    show(rows)


def read(path: Path, limit: int) -> list[str]:
    """The first user message of `limit` prompts of each group."""
    taken: dict[str, int] = {}
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        group = str(row.get("category", row.get("group", "")))
        taken[group] = taken.get(group, 0) + 1
        if taken[group] <= limit:
            out.append(row["turns"][0] if "turns" in row else row["prompt"])
    return out


def compare(args: argparse.Namespace, precision: str, prompts: Sequence[str]) -> list[dict[str, Any]]:
    options = dict(one.split("=", 1) for one in args.set or ["scope=private"])
    setting = {"model": args.model, "runtime": args.runtime, "precision": precision or None, "method": args.method,
               "options": options, "shape": args.shape, "device": args.device, "dtype": args.dtype}  # fmt: skip
    both = [Checkout(args.before, setting), Checkout(args.after, setting)]
    methods = ["plain", args.method]
    rounds: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    same = dict.fromkeys(methods, True)
    try:
        for method in methods:  # what is compiled or timed at first use is not measured
            for checkout in both:
                checkout.answer(prompts[0], method, 32)
        for number in range(args.rounds):
            spent = {method: ([0.0, 0], [0.0, 0]) for method in methods}
            for prompt in prompts:
                for method in methods:
                    made = {
                        i: both[i].answer(prompt, method, args.max_new_tokens) for i in ((0, 1), (1, 0))[number % 2]
                    }
                    same[method] &= made[0]["ids"] == made[1]["ids"]
                    for i, answer in made.items():
                        spent[method][i][0] += answer["seconds"]
                        spent[method][i][1] += len(answer["ids"])
            for method, (before, after) in spent.items():
                rounds[method].append((before[1] / before[0], after[1] / after[0]))
            print(f"{precision}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    finally:
        for checkout in both:
            checkout.close()
    return [
        {
            "precision": precision, "method": method, "before": median(one for one, _ in found),
            "after": median(other for _, other in found), "ratio": median(other / one for one, other in found),
            "rounds": [other / one for one, other in found], "same_text": same[method],
        }
        for method, found in rounds.items()
    ]  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("precision", "method", "before, tokens/s", "after, tokens/s", "after / before", "rounds", "same text")
    for row in rows:
        spread = ", ".join(f"{ratio:.3f}" for ratio in row["rounds"])
        table.add_row(row["precision"], row["method"], f"{row['before']:.1f}", f"{row['after']:.1f}",
                      f"{row['ratio']:.3f}", spread, "yes" if row["same_text"] else "NO")  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
