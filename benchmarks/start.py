"""What a start takes and what it leaves behind: processor time, wall time, peak memory and disk, held against bars.

    python benchmarks/start.py [--model FILE=GB]... [--check] [--json FILE]

Each row is one process of `outrider generate "hi" -n 1`, measured by what the system says of it. The embedded model
comes first, then each file in int8: first starts in caches of their own (the very first of all compiles every kernel,
those after it are the first loads of a model), then second starts, of which the middle one of three counts. Beside
them llama.cpp with the same file, where `outrider bench setup xllamacpp` was run, and with `--check` the gate.
`=GB` is the memory that later starts with a file may take at most. Nothing else may run meanwhile; about eight minutes
for two files of 0.5 and 1.1 GB on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from outrider.bench.environments import find_peer, python_of
from outrider.core.errors import InputError

TIMES = 3
BYTES = {"int8": 1.0, "float32": 4.0}  # of a weight
LLAMA = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = sys.argv[1], 512, 1, 0, False
server = xllamacpp.Server(params)
assert server.handle_completions({"prompt": "hi", "max_tokens": 1})
"""
MEASURED = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, time.perf_counter() - begun, used.ru_maxrss]))
"""


@dataclass(frozen=True)
class Start:
    """One process, with those that it started."""

    cpu_s: float
    wall_s: float
    peak_gb: float  # of the one that took most


@dataclass
class Bar:
    what: str
    measured: float
    at_most: float
    unit: str

    @property
    def row(self) -> str:
        kept = "yes" if self.measured <= self.at_most else "**no**"
        return f"| {self.what} | {self.measured:.2f} {self.unit} | {self.at_most:.2f} {self.unit} | {kept} |"


@dataclass
class Found:
    rows: dict[str, Start] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    disk_mb: dict[str, float] = field(default_factory=dict)
    imports: dict[str, float] = field(default_factory=dict)


def environment(scratch: Path | None) -> dict[str, str]:
    """As after an installation: with modules compiled, which some environments switch off; caches in `scratch`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept if scratch is None else kept | {"XDG_CACHE_HOME": str(scratch)}


def measured(command: Sequence[str], scratch: Path | None = None) -> Start:
    """By a child of its own: the largest memory of all children so far would be that of another one."""
    line = [sys.executable, "-c", MEASURED, *command]
    said = subprocess.run(line, capture_output=True, text=True, check=True, env=environment(scratch))
    code, cpu, wall, peak = json.loads(said.stdout)
    if code:
        sys.exit(f"this failed: {' '.join(command)}")
    unit = 1 if sys.platform == "darwin" else 1024
    start = Start(round(cpu, 2), round(wall, 2), round(peak * unit / 1e9, 3))
    print(start, " ".join(command)[-60:], file=sys.stderr)
    return start


def middle(command: Sequence[str], scratch: Path | None = None) -> Start:
    runs = [measured(command, scratch) for _ in range(TIMES)]
    return Start(
        median(run.cpu_s for run in runs), median(run.wall_s for run in runs), max(run.peak_gb for run in runs)
    )


def imports(command: Sequence[str], scratch: Path) -> dict[str, float]:
    """Seconds by package, of the modules of each alone; the largest first. Timing them takes time itself."""
    line = [command[0], "-X", "importtime", *command[1:]]
    said = subprocess.run(line, capture_output=True, text=True, check=True, env=environment(scratch)).stderr
    seconds: dict[str, float] = defaultdict(float)
    for found in re.finditer(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", said, re.MULTILINE):
        seconds[found[2].split(".")[0]] += int(found[1]) / 1e6
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: round(value, 3) for name, value in ranked[:12]}


def generate(model: str, precision: str, method: str) -> list[str]:
    return [
        sys.executable, "-m", "outrider", "generate", "hi", "-n", "1", "-m", model, "--precision", precision,
        "--method", method,
    ]  # fmt: skip


def again(scratch: Path) -> None:
    """The next start is the first load of its model, with kernels that are compiled already."""
    for kind in ("native", "known", "cost"):
        shutil.rmtree(scratch / "outrider" / kind, ignore_errors=True)


def disk(scratch: Path, precision: str) -> tuple[float, float]:
    """Megabytes of the packed weights of the one model that is there, and of so many weights in that precision."""
    (packed,) = (scratch / "outrider" / "native").glob(f"*-{precision}-*/weights.bin")
    (known,) = (scratch / "outrider" / "known").glob("*/known.json")
    return packed.stat().st_size / 1e6, json.loads(known.read_text())["parameters"] * BYTES[precision] / 1e6


def model(found: Found, scratch: Path, source: str, precision: str, most: dict[str, float]) -> None:
    """Changes `found`: one model in one precision. `most`: gigabytes that later starts may take, by method."""
    name = f"{Path(source).stem}, {precision}"
    first, later = {}, {}
    for method in ("plain", "mix"):
        again(scratch)
        first[method] = measured(generate(source, precision, method), scratch)
        later[method] = middle(generate(source, precision, method), scratch)
        found.rows |= {f"{name}, {method}: first load": first[method], f"{name}, {method}": later[method]}
        ratio = first[method].peak_gb / later[method].peak_gb
        found.bars.append(Bar(f"{name}, {method}: memory of the first load, of later ones", ratio, 1.5, ""))
        if method in most:
            found.bars.append(Bar(f"{name}, {method}: memory", later[method].peak_gb, most[method], "GB"))
    packed, needed = disk(scratch, precision)
    found.disk_mb[name] = round(packed, 1)
    found.bars.append(Bar(f"{name}: disk, of what the precision needs", packed / needed, 1.3, ""))


def llama(found: Found, name: str, path: Path) -> None:
    """Changes `found`: the same file by llama.cpp, where it is to be had."""
    try:
        python = python_of(find_peer("xllamacpp"))
    except InputError as error:
        print(f"llama.cpp is left out: {error}", file=sys.stderr)
        return
    found.rows[f"{name} by llama.cpp"] = middle([str(python), "-c", LLAMA, str(path)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], metavar="FILE=GB")
    parser.add_argument("--check", action="store_true", help="also time the gate of a model-free method")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found, python = Found(), sys.executable
    torch = found.rows["import torch"] = middle([python, "-c", "import torch"])
    alone = found.rows["python"] = middle([python, "-c", "pass"])
    ours = found.rows["import outrider"] = middle([python, "-c", "import outrider"])
    found.bars.append(Bar("import outrider, beyond python", 1000 * (ours.cpu_s - alone.cpu_s), 50, "ms"))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["NUMBA_CACHE_DIR"] = str(scratch / "numba")
        embedded = generate("smollm2", "int8", "mix")
        first = found.rows["smollm2, int8, mix: the very first start"] = measured(embedded, scratch)
        found.bars.append(Bar("the very first start, wall", first.wall_s, 60, "s"))
        model(found, scratch, "smollm2", "int8", {"mix": 0.9, "plain": 0.7})
        second = found.rows["smollm2, int8, mix"].cpu_s
        found.bars.append(Bar("smollm2, int8, mix: second start", second, max(3.0, 2.5 * torch.cpu_s), "s"))
        found.imports = imports(embedded, scratch)
        model(found, scratch, "smollm2", "float32", {})
        llama(found, "smollm2", next((scratch / "outrider" / "models").rglob("*.gguf")))
        for file, _, most in (text.partition("=") for text in given.model):
            path = Path(file).expanduser()
            model(found, scratch, str(path), "int8", dict.fromkeys(("mix", "plain"), float(most)) if most else {})
            took = found.rows[f"{path.stem}, int8, mix"].cpu_s
            found.bars.append(Bar(f"{path.stem}, int8, mix: second start", took, second + 1, "s"))
            llama(found, path.stem, path)
        if given.check:
            gate = measured([python, "-m", "outrider", "check", "--method", "suffix"], scratch)
            found.rows["check of suffix"] = gate
            found.bars.append(Bar("check of suffix, wall", gate.wall_s, 180, "s"))
    print("| what | processor s | wall s | peak GB |\n|---|---|---|---|")
    for name, start in found.rows.items():
        print(f"| {name} | {start.cpu_s:.2f} | {start.wall_s:.2f} | {start.peak_gb:.2f} |")
    print("\n| bar | measured | at most | kept |\n|---|---|---|---|")
    print("\n".join(bar.row for bar in found.bars))
    print("\n| packed | MB |\n|---|---|")
    print("\n".join(f"| {name} | {size:.0f} |" for name, size in found.disk_mb.items()))
    print("\n| package | seconds of import |\n|---|---|")
    print("\n".join(f"| {name} | {seconds:.3f} |" for name, seconds in found.imports.items()))
    if given.json:
        given.json.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
