"""The default method against plain decoding, fixed sizes of the same parts, its parts alone and without its network.

Every prompt is answered by everybody before the next one, so that nobody is measured on a busier machine; rounds begin
with nothing learnt of texts. Speed is decoding only, over plain decoding of the same round; of rounds the median
counts. Below the table: how near the default comes to the best of the others, over all prompts and in its worst group,
and its worst five prompts in a row and worst long answer against plain decoding.
Run: python benchmarks/default_method.py --prompts FILE.jsonl [--model M] [--runtime native] [--precision int8]
     [--draft SMALL] [--sizes 1,3,7,15,31,63] [--temperature 0] [--rounds 3] [--limit N] [--json [FILE]]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, run
from rich.console import Console
from rich.table import Table

import outrider
from outrider.api import Outrider
from outrider.bench.compare import per_group
from outrider.bench.contenders import BASELINE, EngineRunner
from outrider.core.params import SamplingParams
from outrider.core.records import Role
from outrider.draft.mix import Mix
from outrider.methods.mixed import MODEL_FREE
from outrider.store.prompts import Prompt, built_in_prompts, read_prompts

DEFAULT = "default"
LONG = 128  # tokens of an answer that is judged by itself
IN_A_ROW = 5
ALONE = {"predicted"}  # has nothing to say unless the caller predicts the answer


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--precision")
    parser.add_argument("--draft", default="", help="a smaller model to draft with as well")
    parser.add_argument("--sizes", default="1,3,7,15,31,63", help="fixed numbers of candidates")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-context", type=int, default=4096)
    args = parser.parse_args()
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1)
    answers: list[dict[str, Any]] = []
    with outrider.load(
        args.model, method="plain", device=args.device, dtype=args.dtype, runtime=args.runtime,
        precision=args.precision, max_slots=2 if args.draft else 1, max_context=args.max_context,
    ) as engine:  # fmt: skip
        runners = contenders(engine, args)
        texts = [engine.encode_chat(prompt.conversation(())) for prompt in prompts]
        for runner in runners.values():  # what is compiled or recorded at first use is not measured
            runner([texts[0]], params)
        for number in range(args.rounds):
            for runner in runners.values():
                runner.forget()
            for prompt, text in zip(prompts, texts, strict=True):
                answers += [_answer(label, runner, prompt, text, params, number) for label, runner in runners.items()]
                _write(args, answers, prompts)
            _say(f"round {number + 1} of {args.rounds}")
    made = _write(args, answers, prompts)
    if args.json == "-":
        print(json.dumps(made, indent=2))
    else:
        _show(made)


def contenders(engine: Outrider, args: Any) -> dict[str, EngineRunner]:
    given = {"draft": args.draft} if args.draft else {}
    default = engine.recipe("mix", given)
    assert isinstance(default.drafter, Mix)
    out = {BASELINE: EngineRunner(engine, engine.recipe(BASELINE)), DEFAULT: EngineRunner(engine, default)}
    for size in args.sizes.split(","):
        fixed = {"size": "budget", "budget": int(size)}
        out[f"always {size}"] = EngineRunner(engine, engine.recipe("mix", given | fixed))
    if any(part.role is Role.RUNS for part in default.drafter.parts):
        out["model-free"] = EngineRunner(engine, engine.recipe("mix", {"parts": MODEL_FREE}))
    for part in default.drafter.drafters:
        if part.name not in ALONE:
            options = given if part.name == "draft-model" else {}
            out[part.name] = EngineRunner(engine, engine.recipe(part.name, options))
    return out


def _answer(
    label: str, runner: EngineRunner, prompt: Prompt, text: list[int], params: SamplingParams, number: int
) -> dict[str, Any]:  # fmt: skip
    made = runner([text], params)
    return {"label": label, "group": prompt.group, "round": number, "tokens": made.stats.new_tokens,
            "seconds": made.stats.decode_s, "steps": made.stats.steps, "output": list(made.outputs[0])}  # fmt: skip


def figures(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over plain decoding by contender and group (and over all), and how the default stands."""
    labels = list(dict.fromkeys(one["label"] for one in answers))
    groups = list(dict.fromkeys(one["group"] for one in answers))
    by = {label: [one for one in answers if one["label"] == label] for label in labels}
    table = {
        label: {"tokens_per_s": _speed(by[label]), "accepted_length": _per_step(by[label]),
                "all": _over(by[label], by[BASELINE])}
        | {group: _over(*([one for one in by[name] if one["group"] == group] for name in (label, BASELINE)))
           for group in groups}
        for label in labels
    }  # fmt: skip
    others = [label for label in labels if label != DEFAULT]
    best = {where: max(table[label][where] for label in others) for where in ("all", *groups)}
    shares = {where: table[DEFAULT][where] / best[where] for where in best}
    default, plain = by[DEFAULT], by[BASELINE]
    rows = [_over(default[i : i + IN_A_ROW], plain[i : i + IN_A_ROW]) for i in range(len(plain) - IN_A_ROW + 1)]
    single = [
        plain[i]["seconds"] / default[i]["seconds"] for i in range(len(plain)) if plain[i]["tokens"] >= LONG
    ]  # fmt: skip
    return {
        "table": table, "of_the_best": shares, "worst_five_in_a_row": min(rows, default=None),
        "worst_long_answer": min(single, default=None),
        "other_texts": {label: sum(a["output"] != b["output"] for a, b in zip(by[label], plain, strict=True))
                        for label in labels},
    }  # fmt: skip


def _speed(some: Sequence[dict[str, Any]]) -> float:
    return sum(one["tokens"] for one in some) / sum(one["seconds"] for one in some)


def _per_step(some: Sequence[dict[str, Any]]) -> float:
    return sum(one["tokens"] for one in some) / sum(one["steps"] for one in some)


def _over(some: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> float:
    """The median over rounds of how many times as fast."""
    rounds = sorted({one["round"] for one in some})
    return median(
        _speed([one for one in some if one["round"] == now]) / _speed([one for one in plain if one["round"] == now])
        for now in rounds
    )  # fmt: skip


def _write(args: Any, answers: list[dict[str, Any]], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """After every prompt: a run that is cut short leaves what it has."""
    done = len(answers) // len({one["label"] for one in answers})
    made = {"settings": vars(args), "prompts": len(prompts), "answered": done, **figures(answers), "answers": answers}
    if args.json not in (None, "-"):
        Path(args.json).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made


def _show(made: dict[str, Any]) -> None:
    columns = list(made["table"][BASELINE])
    table = Table("", "tokens/s", "accepted length", *columns[2:])
    for label, row in made["table"].items():
        cells = [f"{row['tokens_per_s']:.1f}", f"{row['accepted_length']:.2f}"]
        table.add_row(label, *cells, *(f"{row[name]:.2f}x" for name in columns[2:]))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    worst = min(made["of_the_best"].items(), key=lambda item: item[1])
    print(f"default: {made['of_the_best']['all']:.3f} of the best over all, {worst[1]:.3f} in {worst[0]}")
    for what in ("worst_five_in_a_row", "worst_long_answer"):
        if made[what] is not None:
            print(f"{what.replace('_', ' ')}: {made[what]:.3f}x of plain decoding")
    print(f"texts other than plain decoding's: {sum(made['other_texts'].values())}")


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
