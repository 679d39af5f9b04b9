"""What passes of a BlockFFN model read: experts and bytes by rows, in chains and trees of a text; and that it is right.

    python benchmarks/architectures/blockffn_bytes.py FOLDER --text PATH [--device cpu] [--tokens 512] [--json FILE]

A chain is a stretch of the text; a tree has that stretch, and beside each of its tokens another one. The union of
experts is compared with all experts, row by row, in every pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.core.records import NO_NEEDS, Piece
from outrider.core.tree import TokenTree, fixed
from outrider.models import load_model
from outrider.models.networks.blockffn import RoutedFeedForward, bytes_read, routed_layers
from outrider.runtime.targets import eager_target
from outrider.train.blockffn import encoded, read_text

ROWS = (1, 2, 4, 8, 16, 32)


def bushy(tokens: list[int], vocabulary: int) -> TokenTree:
    """The text and, beside each token, another."""
    ids, parents, last = [tokens[0]], [-1], 0
    for token in tokens[1 : (len(tokens) + 1) // 2 + 1]:
        ids += [token, (token + 17) % vocabulary]
        parents += [last, last]
        last = len(ids) - 2
    return fixed(np.array(ids[: len(tokens)]), np.array(parents[: len(tokens)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--text", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    loaded = load_model(args.folder, device=args.device, dtype="float32")
    tokens = encoded(loaded.tokenizer, read_text([Path(args.text)], 200_000)).tolist()[-args.tokens :]
    target = eager_target(loaded.model, max_slots=1, max_context=args.tokens + 64, self_test=False)
    differences: list[float] = []
    union = RoutedFeedForward.union

    def compared(self: RoutedFeedForward, rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        out = union(self, rows, gates)
        differences.append(float((out - self.dense(rows, gates)).abs().max()))
        return out

    RoutedFeedForward.union = compared  # type: ignore[method-assign]
    layers = routed_layers(loaded.model)
    whole = sum(weight.nbytes for weight in loaded.model.parameters())
    report: dict[str, Any] = {"bytes of all weights": whole, "experts": layers[0].num_experts}
    slot, at = target.acquire(), 0
    seen: dict[str, dict[int, list[tuple[float, float]]]] = {k: {n: [] for n in ROWS} for k in ("chain", "tree")}
    while at + max(ROWS) < len(tokens):
        for count in ROWS:
            part = tokens[at : at + count]
            straight = fixed(np.array(part), np.arange(count) - 1)
            for kind, tree in (("chain", straight), ("tree", bushy(part, target.vocab_size))):
                target.run([Piece(slot, tree=tree)], NO_NEEDS)
                active = float(np.mean([float(layer.last_active) for layer in layers]))
                seen[kind][count].append((active, bytes_read(loaded.model)))
        target.run([Piece(slot, tokens[at : at + 16])], NO_NEEDS)
        at += 16
    for kind, by_rows in seen.items():
        report[kind] = {
            n: dict(zip(("experts", "megabytes a step"), np.mean(found, 0).round(2).tolist(), strict=True))
            for n, found in by_rows.items()
        }
        for facts in report[kind].values():
            facts["megabytes a step"] = round(facts["megabytes a step"] / 1e6, 2)
    report["largest difference from all experts"] = max(differences)
    print(json.dumps(report, indent=1), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
