"""On-line adaptation on a shifted domain: accepted length along a stream of chat requests, then of code requests.

The same requests with the drafter as it is and with one that learns while it drafts; the texts are compared, because
they must be the same. Figures are of windows of so many requests, in order.
Run: python benchmarks/online.py [--requests N] [--max-new-tokens N] [--lr X] [--every ROWS] [--thread] [--svg FILE]
     [--drafter FOLDER] [--save FOLDER] [--json [FILE]]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from common import give, run

import outrider
from outrider.generation import Generation
from outrider.train.online import AdaptPlan, adapt

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    defaults = AdaptPlan()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--drafter", default="")
    parser.add_argument("--requests", type=int, default=12, help="of each domain")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--window", type=int, default=3, help="requests of one figure")
    parser.add_argument("--every", type=int, default=defaults.every)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--thread", action="store_true", help="updates in the background instead of between requests")
    parser.add_argument("--svg", metavar="FILE")
    parser.add_argument("--save", metavar="FOLDER", help="the adapted drafter")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    plan = AdaptPlan(every=args.every, steps=args.steps, lr=args.lr, background=args.thread)
    code = [f"Write a SQL CREATE TABLE statement and three INSERT statements for a table of {name}." for name in TABLES]
    asked = [("chat", CHAT[i % len(CHAT)]) for i in range(args.requests)]
    asked += [("code", code[i % len(code)]) for i in range(args.requests)]
    options = {"drafter": args.drafter, "budget": 16, "controller": "fixed", "verifier": "invariant"}
    texts: dict[str, list[Generation]] = {}
    updates: list[dict[str, Any]] = []
    for name in ("frozen", "adapting"):
        settings = {"options": options, "device": args.device, "dtype": args.dtype}
        with outrider.load(args.model, "eagle3", strict=True, **settings) as own:

            def answer(text: str, engine: outrider.Outrider = own) -> Generation:
                return engine.chat(text, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=1)

            if name == "frozen":
                texts[name] = [answer(text) for _, text in asked]
                continue
            with adapt(own, plan) as learner:
                texts[name] = [answer(text) for _, text in asked]
                updates = [asdict(update) for update in learner.updates]
                if args.save:
                    learner.save(args.save)
    curve = [
        {"domain": asked[at][0], "tokens": sum(g.stats.new_tokens for g in texts["frozen"][:at]),
         **{name: accepted(made[at : at + args.window]) for name, made in texts.items()}}
        for at in range(0, len(asked), args.window)
    ]  # fmt: skip
    same = [a.token_ids == b.token_ids for a, b in zip(*texts.values(), strict=True)]
    lines = ["domain  tokens before  frozen  adapting"]
    lines += [f"{p['domain']:6}  {p['tokens']:13}  {p['frozen']:6.2f}  {p['adapting']:8.2f}" for p in curve]
    for domain in ("chat", "code"):
        own = [i for i, (kind, _) in enumerate(asked) if kind == domain]
        both = {name: accepted([made[i] for i in own]) for name, made in texts.items()}
        lines.append(f"{domain}: frozen {both['frozen']:.3f}, adapting {both['adapting']:.3f}")
    outcomes = [update["outcome"] for update in updates]
    lines.append(f"updates: {', '.join(f'{outcomes.count(o)} {o}' for o in dict.fromkeys(outcomes)) or 'none'}; "
                 f"same text in {sum(same)} of {len(same)} requests")  # fmt: skip
    if args.svg:
        draw(curve, args.svg)
    give(args, {"plan": asdict(plan), "curve": curve, "updates": updates, "same_text": same}, lines)


def accepted(results: list[Generation]) -> float:
    return sum(g.stats.new_tokens for g in results) / max(sum(g.stats.steps for g in results), 1)


def draw(curve: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    at = [point["tokens"] for point in curve]
    for name, style in (("frozen", "--"), ("adapting", "-")):
        axes.plot(at, [point[name] for point in curve], style, label=name)
    axes.axvline(next(point["tokens"] for point in curve if point["domain"] == "code"), color="grey", lw=0.8)
    axes.set(xlabel="tokens written before (chat, then code)", ylabel="accepted length")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
