"""Which loss makes the better drafter: one kind, one text, one plan, every loss with several seeds.

Everything but the loss and the seed is the same; cross-entropy with hard labels is the baseline. Reported are held-out
acceptance of the first token, greedy and drawn at temperature 1, and tokens a target step of a greedy chain, from the
acceptance at each depth; mean over the seeds and its standard error, and the gain over the baseline, paired by seed.
Learning rates are not tuned for each loss: `tvdpp` is `tvd` at another effective rate.
Run: python benchmarks/training/losses.py --data DATA [--model smollm2] [--kind eagle3] [--steps 300] [--seeds 3]
     [-o vocab=8192 ...] [--json [FILE]]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.cli.options import parse_options
from outrider.core.errors import OutriderError
from outrider.models import load_model
from outrider.train.kinds.registry import KINDS, find_kind, plan_of, train_drafter
from outrider.train.loop import Point
from outrider.train.losses import LOSSES
from outrider.train.text.selfdata import read_data

BASELINE = "ce"
FIGURES = ("greedy", "sampled", "chain")


def chain(point: Point) -> float:
    """Tokens a target step with a greedy chain as deep as was measured, the target's own included."""
    reached, total = 1.0, 1.0
    for rate in point.depths or (point.greedy,):
        reached *= rate
        total += reached
    return total


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), spread


def rows(reached: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One for each loss: every figure with its error, and its gain over the baseline with its own."""
    made = []
    for loss, runs in reached.items():
        row: dict[str, Any] = {"loss": loss}
        for figure in FIGURES:
            row[figure] = mean_and_error([run[figure] for run in runs])
            pairs = zip(runs, reached[BASELINE], strict=True)
            row[f"{figure} gain"] = mean_and_error([run[figure] - base[figure] for run, base in pairs])
        made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="made by: outrider train data")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--kind", default="eagle3", choices=list(KINDS))
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-o", "--option", action="append", help="name=value, another setting of the kind")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON to standard output, or to FILE")
    args = parser.parse_args()
    settings = {"steps": args.steps, "batch": args.batch, **parse_options(args.option)}
    losses = list(dict.fromkeys([BASELINE, *args.losses.split(",")]))
    kind, seeds = find_kind(args.kind), range(args.seeds)
    plans = {loss: [plan_of(kind, settings | {"loss": loss, "seed": seed}) for seed in seeds] for loss in losses}
    target = load_model(args.model, device=args.device, dtype=args.dtype)
    data = read_data(args.data, target.fingerprint)
    reached: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for loss, tried in plans.items():
            reached[loss] = []
            for plan in tried:
                folder = Path(scratch) / f"{loss}-{plan.seed}"
                _, curve = train_drafter(args.kind, target, data, plan, folder, measure_every=plan.steps)
                last = curve[-1]
                reached[loss].append(
                    {"greedy": last.greedy, "sampled": last.sampled, "chain": chain(last), "seconds": last.seconds}
                )
                print(f"{loss}, seed {plan.seed}: {reached[loss][-1]}", file=sys.stderr)
    found = rows(reached)
    result = json.dumps({"kind": args.kind, "settings": settings, "rows": found, "runs": reached}, indent=1)
    if args.json == "-":
        print(result)
        return
    if args.json:
        Path(args.json).write_text(result + "\n", encoding="utf-8")
    print(f"{'loss':8}" + "".join(f"{figure:>18}{'gain':>18}" for figure in FIGURES))
    for row in found:
        cells = [row[name] for figure in FIGURES for name in (figure, f"{figure} gain")]
        print(f"{row['loss']:8}" + "".join(f"{f'{mean:.3f} +- {error:.3f}':>18}" for mean, error in cells))


if __name__ == "__main__":
    try:
        main()
    except OutriderError as error:
        sys.exit(f"error: {error}")
