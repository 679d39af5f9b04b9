"""On-line adaptation on a shifted domain: accepted length along a stream of chat requests, then of SQL requests.

The same requests with the drafter as it is and with one that learns while it drafts; the texts are compared, because
they must be the same. Figures are of windows of so many requests, in order; Ctrl-C ends the stream early.
Run: python benchmarks/training/online.py [--chat N] [--sql N] [--max-new-tokens N] [--lr X] [--every ROWS] [--thread]
     [--svg FILE] [--drafter FOLDER] [--frozen FILE] [--save FOLDER] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import outrider
from benchmarks.common import give, run
from outrider.core.errors import InputError
from outrider.runtime.choice import AUTO_NAME
from outrider.train.online.adapt import AdaptPlan, adapt

CHAT = (
    "Why is the sky blue?", "What should I cook tonight?", "Tell me about the Roman Empire.", "How do plants grow?",
    "Give me tips for a job interview.", "What is photosynthesis?", "Who was Marie Curie?", "How do magnets work?",
    "Plan a weekend in Lisbon.", "What makes a good friend?", "Explain inflation simply.", "How are glaciers formed?",
)  # fmt: skip
TABLES = (
    "customers", "books", "flights", "employees", "orders", "students", "movies", "songs", "recipes", "hotels", "rooms",
    "patients", "doctors", "cars", "invoices", "payments", "cities", "countries", "teams", "players", "courses",
    "teachers", "products", "suppliers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    defaults = AdaptPlan()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--runtime", default=AUTO_NAME)
    parser.add_argument("--drafter", default="")
    parser.add_argument("--chat", type=int, default=6, help="requests of chat")
    parser.add_argument("--sql", type=int, default=12, help="requests of SQL after them")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--window", type=int, default=3, help="requests of one figure")
    parser.add_argument("--every", type=int, default=defaults.every)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--thread", action="store_true", help="updates in the background instead of between requests")
    parser.add_argument("--frozen", metavar="FILE", help="answers of the frozen drafter: written, or read if there")
    parser.add_argument("--svg", metavar="FILE")
    parser.add_argument("--save", metavar="FOLDER", help="the adapted drafter")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    plan = AdaptPlan(every=args.every, steps=args.steps, lr=args.lr, background=args.thread)
    sql = [f"Write a SQL CREATE TABLE statement and three INSERT statements for a table of {name}." for name in TABLES]
    asked = [("chat", CHAT[i % len(CHAT)]) for i in range(args.chat)]
    asked += [("SQL", sql[i % len(sql)]) for i in range(args.sql)]
    options = {"drafter": args.drafter, "budget": 16, "controller": "fixed", "verifier": "invariant"}
    settings = {"options": options, "device": args.device, "dtype": args.dtype, "runtime": args.runtime}
    with outrider.load(args.model, "eagle3", strict=True, max_slots=1, **settings) as engine:

        def answer(text: str) -> Answer:
            sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": 1}
            made = engine.chat(text, **sampling)
            return Answer(list(made.token_ids), made.stats.steps)

        texts = {"frozen": known(args.frozen) or [answer(text) for _, text in asked]}
        if args.frozen:
            Path(args.frozen).write_text(
                json.dumps([asdict(answer) for answer in texts["frozen"]]) + "\n", encoding="utf-8"
            )
        if len(texts["frozen"]) != len(asked):
            raise InputError(f"{args.frozen} holds {len(texts['frozen'])} answers, not {len(asked)}; remove it")
        with adapt(engine, plan) as learner:
            texts["adapting"] = []
            try:
                for _, text in asked:
                    texts["adapting"].append(answer(text))
            except KeyboardInterrupt:
                print("interrupted: figures are of the whole windows before that", file=sys.stderr)
            updates = [asdict(update) for update in learner.updates]
            if args.save:
                learner.save(args.save)
    whole = len(texts["adapting"]) // args.window * args.window
    asked, texts = asked[:whole], {name: made[:whole] for name, made in texts.items()}
    curve = [
        {"domain": asked[at][0], "tokens": sum(len(answer.token_ids) for answer in texts["frozen"][:at]),
         **{name: accepted(made[at : at + args.window]) for name, made in texts.items()}}
        for at in range(0, len(asked), args.window)
    ]  # fmt: skip
    same = [a.token_ids == b.token_ids for a, b in zip(*texts.values(), strict=True)]
    lines = ["domain  tokens before  frozen  adapting"]
    lines += [f"{p['domain']:6}  {p['tokens']:13}  {p['frozen']:6.2f}  {p['adapting']:8.2f}" for p in curve]
    for domain in dict.fromkeys(kind for kind, _ in asked):
        members = [i for i, (kind, _) in enumerate(asked) if kind == domain]
        both = {name: accepted([made[i] for i in members]) for name, made in texts.items()}
        lines.append(f"{domain}: frozen {both['frozen']:.3f}, adapting {both['adapting']:.3f}")
    outcomes = [update["outcome"] for update in updates]
    lines.append(f"updates: {', '.join(f'{outcomes.count(o)} {o}' for o in dict.fromkeys(outcomes)) or 'none'}; "
                 f"same text in {sum(same)} of {len(same)} requests")  # fmt: skip
    if args.svg:
        draw(curve, args.svg)
    give(args, {"plan": asdict(plan), "curve": curve, "updates": updates, "same_text": same}, lines)


def known(path: str | None) -> list[Answer]:
    """What an earlier run kept; greedy or seeded, it would be the same again."""
    if not path or not Path(path).exists():
        return []
    return [Answer(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))]


def accepted(answers: list[Answer]) -> float:
    return sum(len(answer.token_ids) for answer in answers) / max(sum(answer.steps for answer in answers), 1)


def draw(curve: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    at = [point["tokens"] for point in curve]
    for name, style in (("frozen", "--"), ("adapting", "-")):
        axes.plot(at, [point[name] for point in curve], style, marker="o", ms=3, label=name)
    for shift in [point["tokens"] for point in curve if point["domain"] == "SQL"][:1]:
        axes.axvline(shift, color="grey", lw=0.8)
    axes.set(xlabel="tokens written before (chat, then SQL)", ylabel="accepted length")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
