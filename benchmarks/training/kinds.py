"""Kinds of trained drafters side by side: one text, as many updates, the same prompts; and what each proposal takes.

Each contender is a kind and settings of it, `dflash block=16 deep=3`. It is trained on the text in --data, then decodes
the prompts greedily with chains of 3 and 7 and trees of 16 and 32 nodes. Before that, drafting is timed in decoding
one sequence with an untrained network of each block size, after a first run that records what is recorded.
Run: python benchmarks/training/kinds.py --data FOLDER [--kinds "eagle3;dflash"] [--steps N] [--batch N]
     [--prompts FILE.jsonl] [--limit N] [--timed-blocks 4,16] [--folder FOLDER] [--json [FILE]]
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, give, run
from outrider.bench.compare import per_group
from outrider.models import LoadedModel, load_model
from outrider.store.prompts import Prompt, built_in_prompts, read_prompts
from outrider.train.evaluate import EvalPlan, evaluate
from outrider.train.kinds.registry import find_kind, plan_of, train_drafter
from outrider.train.text.selfdata import SelfData, read_data

TREES = (("chain of 3", "chain", 3), ("chain of 7", "chain", 7), ("16 nodes", "", 16), ("32 nodes", "", 32))
DEEPEST = {"eagle3": 6, "eagle2": 6, "fspad": 6}  # levels of a tree; other kinds go as deep as they can
AS_DEEP_AS_IT_CAN = 31


def main() -> None:
    parser = arguments(__doc__, max_new_tokens=128)
    parser.add_argument("--data", required=True, help="text made by `outrider train data`")
    parser.add_argument("--kinds", default="eagle3;dflash block=8;dflash block=16")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--timed-blocks", default="4,16")
    parser.add_argument("--folder", help="where drafters are kept; else nowhere")
    args = parser.parse_args()
    prompts = per_group(read_prompts(args.prompts) if args.prompts else built_in_prompts(), args.limit)
    target = load_model(args.model, device=args.device, dtype=args.dtype)
    text = read_data(Path(args.data), target.fingerprint)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder or scratch)
        for block in filter(None, args.timed_blocks.split(",")):
            place = folder / f"timed-{block}"
            train(target, text, "dflash", {"steps": 0, "block": block}, place)
            row = {"contender": f"untrained dflash block={block}", "draft_ms": timed(target, place, prompts, args)}
            print(row, flush=True)
            rows.append(row)
        for number, contender in enumerate(args.kinds.split(";")):
            name, *settings = contender.split()
            given, place = dict(setting.split("=") for setting in settings), folder / f"{number}-{name}"
            for found in contend(name, given, target, text, prompts, args, place):
                print({"contender": contender, **found}, flush=True)
                rows.append({"contender": contender, **found})
    give(args, {"steps": args.steps, "batch": args.batch, "rows": rows}, [f"{len(rows)} rows"])


def contend(
    kind: str, settings: dict[str, str], target: LoadedModel, text: SelfData, prompts: list[Prompt], args: Any,
    folder: Path,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    learner, curve = train(target, text, kind, {"steps": args.steps, "batch": args.batch, **settings}, folder)
    last = curve[-1]
    yield {
        "parameters": sum(weight.numel() for weight in learner.weights.values()), "training_s": last.seconds,
        "loss": last.loss, "greedy": last.greedy, "drawn": last.sampled, "by_depth": last.depths,
    }  # fmt: skip
    yield {"one sequence, 32 nodes: draft_ms": timed(target, folder, prompts, args)}
    plan = EvalPlan((), (0.0,), DEEPEST.get(kind, AS_DEEP_AS_IT_CAN), args.max_new_tokens)
    for name, grower, nodes in TREES:
        every = evaluate(target, folder, prompts, replace(plan, budgets=(nodes,), grower=grower))
        yield {"tree": name, **every[-1].as_dict()}  # the last row is of all groups together


def train(target: LoadedModel, text: SelfData, kind: str, settings: dict[str, Any], folder: Path) -> Any:
    return train_drafter(kind, target, text, plan_of(find_kind(kind), settings), folder, save_every=1e9)


def timed(target: LoadedModel, folder: Path, prompts: list[Prompt], args: Any) -> float:
    """Milliseconds of a proposal of 32 nodes for one sequence, everything on the host included."""
    from outrider.models.drafts import read_card

    depth = DEEPEST.get(read_card(folder).kind, AS_DEEP_AS_IT_CAN)
    plan = EvalPlan((32, 32), (0.0,), depth, args.max_new_tokens, batch=1)
    return round(evaluate(target, folder, prompts[:2], plan)[-1].draft_ms, 3)


if __name__ == "__main__":
    run(main)
