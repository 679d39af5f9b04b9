"""A stand-alone program: runs one adapter of this folder in a peer's own environment, where Outrider is not installed.

Reads one JSON object a line from standard input and writes one back: {"do": "load"} with the mode and where the model
is, then {"do": "generate"} with token ids in, token ids and times out. What libraries print goes to standard error.

An adapter is a file with a function `load(mode, settings)` that returns an object with `facts` (a dictionary: version,
dtype, weights, and where known weight_bytes) and `generate(prompts, params)`, which returns outputs (token ids, one
list a prompt), first_s (seconds until every prompt had its first token), total_s, early (tokens that were there by
then) and steps (forwards of the target, the prefill counting as one; 0: not known). It raises `io.UnsupportedOperation`
for what its runtime cannot do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from io import UnsupportedOperation
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def adapter(name: str) -> Any:
    """By its file: the folder itself must not be on the path, where files are named after the packages they use."""
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    spec = importlib.util.spec_from_file_location(f"peer_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak_bytes(reset: bool = False) -> int | None:
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        return None


def answer(peer: Any, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
    peak_bytes(reset=True)
    made = peer.generate(prompts, params)
    measured = getattr(peer, "peak_bytes", None)  # of a GPU, or of several processes
    return {
        "outputs": [[int(token) for token in tokens] for tokens in made["outputs"]],  # trimmed by who counts them
        "first_s": made["first_s"],
        "total_s": made["total_s"],
        "early": made.get("early", len(prompts)),
        "steps": made.get("steps", 0),
        "turns": made.get("turns", 0),  # answers to sequences: tokens over these is the accepted length, in any batch
        "peak_bytes": measured() if measured else peak_bytes(),
    }


def handle(module: Any, peers: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    mode = asked["mode"]
    if asked["do"] == "load":
        if mode not in peers:
            begun = time.perf_counter()
            peers[mode] = module.load(mode, asked["settings"])
            print(f"loaded {mode} in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        return {"facts": peers[mode].facts}
    return answer(peers[mode], asked["prompts"], asked["params"])


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries may print; only replies go where they are read
    sys.stdout = sys.stderr
    module, peers = None, {}  # type: Any, dict[str, Any]
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            module = module or adapter(sys.argv[1])
            reply = handle(module, peers, asked)
        except UnsupportedOperation as error:
            reply = {"unsupported": str(error)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
