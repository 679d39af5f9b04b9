"""Sizes of a drafter's head: fewer tokens (VocabTrim) and lower ranks (SlimSpec), by draft latency and end to end.

Every head is cut from one drafter, best one over the target's whole vocabulary. Coverage and acceptance of single
tokens are teacher-forced on held-out answers of the target's own text; latency, accepted length and speed are of
decoding prompts with each head in turns, greedily with trees of a fixed size, against the whole head and with intervals
over prompts. With --folder what is done is kept there, and a run that was stopped goes on.
Run: python benchmarks/training/heads.py --data FOLDER [--drafter FOLDER] [--vocab 4096,8192,...] [--ranks 144,288]
     [--prompts FILE.jsonl] [--limit N] [--folder FOLDER] [--svg FILE] [--json [FILE]]
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, give, run
from outrider.api import Outrider
from outrider.bench.compare import Comparison, Plan, compare, per_group
from outrider.bench.contenders import method_contender, parse_specs
from outrider.bench.figures import figures, interval, paired, pooled_ratio
from outrider.bench.journal import Book, Journal
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel, load_model
from outrider.models.drafts import CARD, packed, read_card, shipped_draft, write_drafter
from outrider.models.networks.eagle3 import Eagle3Layer
from outrider.models.trained import load_eagle3
from outrider.runtime.choice import AUTO_NAME
from outrider.store.prompts import Prompt, built_in_prompts, read_prompts
from outrider.train.kinds.heads import Measured, heads_of, measured
from outrider.train.loop import split
from outrider.train.text.selfdata import read_data


@dataclass(frozen=True, slots=True)
class Decoded:
    """What decoding with one head came to."""

    accepted: float
    draft_ms: float  # a step
    tokens_per_s: float
    against: float  # tokens a second over those with the whole head
    interval: list[float] | None
    plain: float  # tokens a second over those of plain decoding


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=64)
    parser.add_argument("--runtime", default=AUTO_NAME)
    parser.add_argument("--drafter", help="an eagle3 drafter; else the shipped one")
    parser.add_argument("--data", required=True, help="text made by `outrider train data`; tokens are counted in it")
    parser.add_argument("--held-out", type=int, default=8, help="sequences of it that only measure")
    parser.add_argument("--vocab", default="4096,8192,12288,16384,32768")
    parser.add_argument("--ranks", default="144,288")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--folder", help="where the heads and what was measured are kept")
    parser.add_argument("--svg", metavar="FILE")
    args = parser.parse_args()
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    target = load_model(args.model, device=args.device, dtype=args.dtype)
    drafter = Path(args.drafter) if args.drafter else shipped_draft(target, "eagle3")
    if drafter is None:
        raise InputError(f"no eagle3 drafter comes with the package for {args.model}; give one with --drafter")
    with kept(args.folder) as folder:
        journal = Journal(folder)
        names = ("vocab", "ranks", "budget", "depth", "limit", "rounds", "max_new_tokens", "held_out", "runtime")
        asked = {"drafter": drafter.name, "prompts": [prompt.id for prompt in prompts]}
        journal.claim(asked | {name: getattr(args, name) for name in names})
        rows = made_heads(args, target, drafter, journal, folder)
        comparison = race(args, target, prompts, rows, folder, Book(journal, "prompts"))
    decoded = {label: outcome(comparison, label, whole=next(iter(rows))) for label in rows}
    payload = {label: rows[label].as_dict() | figures_of(decoded[label]) for label in rows}
    if args.svg:
        draw(rows, decoded, args.svg)
    differ = len({d.unit for d in comparison.differences})
    lines = [*table(rows, decoded), f"{len(prompts)} prompts; answers with another text than plain decoding: {differ}"]
    give(args, {"heads": payload, "settings": comparison.settings, "different texts": differ}, lines)


@contextmanager
def kept(folder: str | None) -> Iterator[Path]:
    if folder:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def made_heads(
    args: Any, target: LoadedModel, drafter: Path, journal: Journal, folder: Path
) -> dict[str, Measured]:  # fmt: skip
    """Figures of each head by label, the whole one first. Changes the folder: each is a drafter there."""
    net = load_eagle3(drafter, target)
    sizes = sorted((int(n) for n in args.vocab.split(",") if n and 0 < int(n) < net.shape.vocab), reverse=True)
    ranks = sorted((int(n) for n in args.ranks.split(",") if n and 0 < int(n) < net.shape.hidden), reverse=True)
    wanted = [(0, 0), *((size, 0) for size in sizes), *((0, rank) for rank in ranks)]
    done = {line["label"]: Measured(**line["row"]) for line in journal.of("head")}
    rows = {}
    text = None
    for vocab, rank in wanted:
        label = f"rank-{rank}" if rank else str(vocab or net.shape.vocab)
        if label not in done or not (folder / label / CARD).exists():
            if text is None:
                text = split(read_data(Path(args.data), target.fingerprint), args.held_out)
            head = next(heads_of(net, target, text[1], [(vocab, rank)]))
            store(folder / label, drafter, head)
            done[label] = measured(head, target, text[0])
            journal.write("head", label=label, row=done[label].as_dict())
        rows[label] = done[label]
    return rows


def store(folder: Path, drafter: Path, net: Eagle3Layer) -> None:
    write_drafter(folder, packed(net.tensors(), True), replace(read_card(drafter), shape=net.shape.as_dict()))


def race(
    args: Any, target: LoadedModel, prompts: Sequence[Prompt], labels: Sequence[str] | dict[str, Any], folder: Path,
    book: Book,
) -> Comparison:  # fmt: skip
    fixed = {"controller": "fixed", "budget": args.budget, "depth": args.depth}
    options = {f"{label}.{name}": value for label in labels for name, value in fixed.items()}
    options |= {f"{label}.drafter": str(folder / label) for label in labels}
    params = SamplingParams(max_new_tokens=args.max_new_tokens, seed=1)
    source = Path(args.prompts).name if args.prompts else "built-in"
    with Outrider(target, "plain", limits={"max_slots": 1}, strict=True, runtime=args.runtime) as engine:
        specs = parse_specs(",".join(["plain", *(f"{label}=eagle3" for label in labels)]), options)
        contenders = [method_contender(engine, spec) for spec in specs]
        comparison = compare(engine, prompts, contenders, Plan(params, args.rounds), source, book=book)
    if not comparison.complete:
        raise SystemExit("interrupted; with --folder the same command goes on")
    return comparison


def outcome(comparison: Comparison, label: str, whole: str) -> Decoded:
    sums = paired(comparison.units, label, whole)
    found = figures(comparison.units, label, comparison.baseline)
    return Decoded(
        found["mean_accepted"], 1e3 * found["draft_share"] * found["decode_s"] / found["steps"], found["tokens_per_s"],
        float(pooled_ratio(sums)), interval(pooled_ratio, sums), found["speedup"],
    )  # fmt: skip


def figures_of(decoded: Decoded) -> dict[str, Any]:
    return {name: getattr(decoded, name) for name in Decoded.__slots__}


def table(rows: dict[str, Measured], decoded: dict[str, Decoded]) -> list[str]:
    lines = [
        "    head  coverage     MB  ms a level  greedy  drawn | accepted  draft ms a step  tokens/s  x plain  x whole"
    ]
    for label, row in rows.items():
        run = decoded[label]
        low, high = run.interval or (float("nan"), float("nan"))
        lines.append(
            f"{label:>8}  {row.coverage:8.3f}  {row.megabytes:5.1f}  {row.milliseconds:10.2f}  {row.greedy:6.3f}  "
            f"{row.sampled:5.3f} | {run.accepted:8.2f}  {run.draft_ms:15.1f}  {run.tokens_per_s:8.1f}  "
            f"{run.plain:7.3f}  {run.against:.3f} [{low:.3f}, {high:.3f}]"
        )
    return lines


def draw(rows: dict[str, Measured], decoded: dict[str, Decoded], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    whole = next(iter(rows))
    families = (("fewer tokens", [n for n in rows if not rows[n].rank], "o-"),
                ("lower rank", [whole, *(n for n in rows if rows[n].rank)], "s--"))  # fmt: skip
    for name, labels, mark in families:
        at = [decoded[label].draft_ms for label in labels]
        left.plot(at, [decoded[label].accepted for label in labels], mark, label=name)
        shown = [n for n in labels if n != whole or name == "fewer tokens"]
        ratios = [decoded[label].against for label in shown]
        ends = [decoded[label].interval or [decoded[label].against] * 2 for label in shown]
        spread = [[abs(ratio - end[i]) for ratio, end in zip(ratios, ends, strict=True)] for i in (0, 1)]
        right.errorbar([decoded[n].draft_ms for n in shown], ratios, spread, fmt=mark[0], capsize=2, label=name)
        for label in shown:
            text = label if rows[label].rank else f"{int(label):,}"
            for axes, y in ((left, decoded[label].accepted), (right, decoded[label].against)):
                axes.annotate(text, (decoded[label].draft_ms, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    right.axhline(1, color="grey", lw=0.8)
    for axes in (left, right):
        axes.margins(x=0.12)  # room for the labels
    left.set(xlabel="milliseconds of drafting a step", ylabel="accepted length")
    right.set(xlabel="milliseconds of drafting a step", ylabel="speed against the whole head")
    left.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
