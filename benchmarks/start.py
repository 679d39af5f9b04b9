"""What a start takes: processor time, wall time and peak memory of `outrider generate "hi" -n 1`, each in a process.

    python benchmarks/start.py [--model M]... [--precision int8] [--fresh] [--json FILE]

For each model a start (with `--fresh` from an empty cache, the first one), then second starts of which the median
counts, with the default method and with `plain`; beside them `import torch` and `import outrider` in the same run, and
what a second start imports. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

TIMES = 3


@dataclass(frozen=True)
class Start:
    """One process."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


def measured(command: list[str], cache: str | None = None) -> Start:
    """Of a child of its own: the largest memory of all children so far would be that of another one."""
    script = (
        "import json, resource, subprocess, sys, time; begun = time.perf_counter();"
        "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode;"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps([code, used.ru_utime + used.ru_stime, time.perf_counter() - begun, used.ru_maxrss]))"
    )
    environment = os.environ | ({"XDG_CACHE_HOME": cache} if cache else {})
    said = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=True, env=environment
    )
    code, cpu, wall, peak = json.loads(said.stdout)
    if code:
        sys.exit(f"this failed: {' '.join(command)}")
    return Start(round(cpu, 2), round(wall, 2), peak * (1 if sys.platform == "darwin" else 1024))


def middle(command: list[str], cache: str | None = None) -> Start:
    runs = [measured(command, cache) for _ in range(TIMES)]
    return Start(
        median(run.cpu_s for run in runs), median(run.wall_s for run in runs), max(run.peak_bytes for run in runs)
    )


def imports(command: list[str], cache: str | None) -> dict[str, float]:
    """Seconds by package, of the modules of each alone; the largest first."""
    environment = os.environ | ({"XDG_CACHE_HOME": cache} if cache else {})
    line = [sys.executable, "-X", "importtime", *command]
    said = subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stderr
    seconds: dict[str, float] = defaultdict(float)
    for found in re.finditer(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", said, re.MULTILINE):
        seconds[found[2].split(".")[0]] += int(found[1]) / 1e6
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: round(value, 3) for name, value in ranked[:12]}


def row(name: str, start: Start) -> str:
    return f"| {name} | {start.cpu_s:.2f} | {start.wall_s:.2f} | {start.peak_bytes / 1e9:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=None)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--fresh", action="store_true", help="measure first starts too, in a cache of their own")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    python = sys.executable
    rows: dict[str, Start] = {
        "import torch": middle([python, "-c", "import torch"]),
        "import outrider": middle([python, "-c", "import outrider"]),
        "python": middle([python, "-c", "pass"]),
    }
    with tempfile.TemporaryDirectory() as scratch:
        cache = scratch if given.fresh else None
        listed: dict[str, float] = {}
        for model in given.model or ["smollm2"]:
            command = ["-m", "outrider", "generate", "hi", "-n", "1", "-m", model, "--precision", given.precision]
            name = Path(model).stem
            rows[f"{name} {given.precision}, first start"] = measured([python, *command], cache)
            rows[f"{name} {given.precision}, mix"] = middle([python, *command], cache)
            rows[f"{name} {given.precision}, plain"] = middle([python, *command, "--method", "plain"], cache)
            listed = listed or imports(command, cache)
    print("| what | processor s | wall s | peak GB |\n|---|---|---|---|")
    print("\n".join(row(name, start) for name, start in rows.items()))
    print(f"\n{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6:.2f} GB: the largest of all\n")
    print("| package | seconds of import |\n|---|---|")
    print("\n".join(f"| {name} | {seconds:.3f} |" for name, seconds in listed.items()))
    if given.json:
        facts = {"rows": {name: asdict(start) for name, start in rows.items()}, "imports": listed}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
