"""Draft latency and accepted length across sizes of a head: fewer tokens (VocabTrim) and lower ranks (SlimSpec).

Teacher-forced on held-out answers of the target's own text; milliseconds are of one tree level of ten candidates here.
With --prompts N, that many built-in prompts are decoded with the whole head and with the one that is best by
accepted length over cost, in turns, and the ratio of decode times is given.
Run: python benchmarks/heads.py [--data FOLDER | --tokens N] [--vocab 1024,2048,...] [--ranks 36,72,144] [--prompts N]
     [--svg FILE] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import give, run

import outrider
from outrider.errors import InputError
from outrider.models import load_model
from outrider.models.drafts import packed, read_card, shipped_draft, write_drafter
from outrider.prompts import built_in_prompts
from outrider.recipes.trained import load_eagle3
from outrider.train.heads import Measured, ranked, smaller, sweep
from outrider.train.loop import split
from outrider.train.selfdata import DataPlan, read_data, write_data
from outrider.train.slim import second_moment

STEP_SHARE = 0.045  # of a target step that one drafted level costs with the whole head; --step-share


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--drafter", help="an eagle3 drafter; else the shipped one")
    parser.add_argument("--data", help="text made by `outrider train data`; else some is written")
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--vocab", default="1024,2048,4096,6144,8192")
    parser.add_argument("--ranks", default="36,72,144,288")
    parser.add_argument("--step-share", type=float, default=STEP_SHARE, help="cost of a level against a target step")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--svg", metavar="FILE")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    target = load_model(args.model, device=args.device, dtype=args.dtype)
    folder = Path(args.drafter) if args.drafter else shipped_draft(target, "eagle3")
    if folder is None:
        raise InputError(f"no eagle3 drafter comes with the package for {args.model}; give one with --drafter")
    if args.data:
        text = read_data(Path(args.data), target.fingerprint)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            text = write_data(target, DataPlan(args.tokens, 192, max(16, args.tokens // 192)), Path(scratch))
    held_out, rest = split(text, args.held_out)
    net = load_eagle3(folder, target)
    sizes = [(int(n), 0) for n in args.vocab.split(",") if 0 < int(n) < net.shape.vocab]
    sizes += [(0, int(n)) for n in args.ranks.split(",") if n and 0 < int(n) < net.shape.hidden]
    rows = sweep(net, target, rest, held_out, [(0, 0), *sizes])
    whole = rows[0]

    def worth(row: Measured) -> float:
        """Tokens a second against the whole head: accepted length over one step and so many levels."""
        cost = 1 + args.depth * args.step_share * row.milliseconds / whole.milliseconds
        return row.chain / cost / (whole.chain / (1 + args.depth * args.step_share))

    best = max(rows, key=worth)
    lines = ["tokens   rank  coverage     MB  ms a level  greedy  drawn  chain  worth"]
    lines += [
        f"{row.vocab:6}  {row.rank or '-':>5}  {row.coverage:8.3f}  {row.megabytes:5.1f}  {row.milliseconds:10.2f}  "
        f"{row.greedy:6.3f}  {row.sampled:5.3f}  {row.chain:5.2f}  {worth(row):5.3f}{'  best' if row is best else ''}"
        for row in rows
    ]  # fmt: skip
    payload: dict[str, Any] = {"rows": [row.as_dict() | {"worth": worth(row)} for row in rows]}
    if args.prompts:
        with tempfile.TemporaryDirectory() as scratch:
            moment = second_moment(target, net, rest) if best.rank else None
            made = smaller(net, ranked(net, target, rest), 0 if best.rank else best.vocab, best.rank, moment)
            card = read_card(folder)
            write_drafter(Path(scratch), packed(made.tensors(), False), _card(card, made))
            payload["end to end"] = ratio = end_to_end(args, target, folder, Path(scratch))
        lines.append(f"decode time, whole head over the best: {ratio['ratio']:.3f}; same text: {ratio['same text']}; "
                     f"accepted length {ratio['accepted'][0]:.2f} and {ratio['accepted'][1]:.2f}")  # fmt: skip
    if args.svg:
        draw(rows, args.svg)
    give(args, payload, lines)


def _card(card: Any, net: Any) -> Any:
    from dataclasses import replace

    return replace(card, shape=net.shape.as_dict())


def end_to_end(args: argparse.Namespace, target: Any, whole: Path, small: Path) -> dict[str, Any]:
    with outrider.Outrider(target, "plain", strict=True) as engine:
        options = {"controller": "fixed", "budget": 12, "depth": args.depth}
        recipes = [engine.recipe("eagle3", options | {"drafter": str(folder)}) for folder in (whole, small)]
        prompts = [engine.encode_chat(prompt.conversation()) for prompt in built_in_prompts()[: args.prompts]]
        params = engine._params(None, {"max_new_tokens": args.max_new_tokens})
        engine.engine.submit(prompts[0], params, recipes[0]).result()  # warm up
        results = [[engine.engine.submit(prompt, params, recipe).result() for recipe in recipes] for prompt in prompts]
    seconds = [sum(pair[i].stats.decode_s for pair in results) for i in (0, 1)]
    steps = [sum(pair[i].stats.steps for pair in results) for i in (0, 1)]
    tokens = sum(pair[0].stats.new_tokens for pair in results)
    return {
        "ratio": seconds[0] / seconds[1], "accepted": [tokens / count for count in steps],
        "same text": all(a.token_ids == b.token_ids for a, b in results), "prompts": len(results),
    }  # fmt: skip


def draw(rows: list[Measured], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 3.6))
    for name, own, mark in (("fewer tokens", [r for r in rows if not r.rank], "o-"),
                            ("lower rank", [r for r in rows if r.rank] + rows[:1], "s--")):  # fmt: skip
        own.sort(key=lambda row: row.megabytes)
        axes.plot([row.milliseconds for row in own], [row.chain for row in own], mark, label=name)
        for row in own:
            label = str(row.rank or f"{row.vocab:,}")
            axes.annotate(label, (row.milliseconds, row.chain), textcoords="offset points", xytext=(3, 4), fontsize=7)
    axes.set(xlabel="milliseconds a drafted level", ylabel="accepted length, greedy chain")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
