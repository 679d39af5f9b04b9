"""What lies in the user's cache, for which model and how large; all of it can be made again.

Packed and converted weights, what is known of models, times that were measured. Drafters that were trained are no part
of it: they lie in the data folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import UnknownName, did_you_mean
from outrider.models.convert import cache_folder

WHAT = {
    "models": "model files as they were fetched or converted",
    "native": "weights as the runtime native reads them",
    "openvino": "graphs of the runtime openvino",
    "known": "what starts need to know of a model",
    "cost": "times of steps on this machine",
    "runtimes": "trials of runtimes on this machine",
    "passes": "sizes of passes that a GPU was asked for most",
    "bench": "other programs, to be measured against",
}
TIMES = ("cost", "runtimes", "passes")  # many small files, shown as one entry


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    name: str  # of the file or folder
    model: str  # empty: of no single one
    bytes: int
    path: Path

    @property
    def what(self) -> str:
        return WHAT.get(self.kind, "")


def entries() -> list[Entry]:
    """Everything, largest first."""
    root = cache_folder().parent
    found: list[Entry] = []
    for kind in WHAT:
        folder = root / kind
        if not folder.is_dir():
            continue
        if kind in TIMES:
            found.append(Entry(kind, kind, "", _size(folder), folder))
            continue
        for path in sorted(folder.iterdir()):
            if path.suffix not in (".lock", ".sha256"):
                found.append(Entry(kind, path.name, _model(kind, path), _size(path), path))
    return sorted(found, key=lambda entry: -entry.bytes)


def chosen(names: Sequence[str]) -> list[Entry]:
    """Entries by kind, by the beginning of their name, or by model."""
    every, picked = entries(), []
    for name in names:
        hits = [e for e in every if name in (e.kind, e.model) or e.name.startswith(name)] if name else []
        if not hits:
            known = sorted({e.kind for e in every} | {e.model for e in every if e.model})
            raise UnknownName(f"nothing in the cache is called {name!r}; {did_you_mean(name, known)}"
                              f"there are: {', '.join(known) or 'no entries'}")  # fmt: skip
        picked += [entry for entry in hits if entry not in picked]
    return picked


def clear(picked: Sequence[Entry]) -> int:
    """Changes the cache. Bytes that are free now. A process that has one of them open goes on with it."""
    for entry in picked:
        if entry.path.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.path.unlink()
        with suppress(OSError):
            entry.path.with_name(f"{entry.path.name}.lock").unlink()
    return sum(entry.bytes for entry in picked if not entry.path.exists())


def remembered() -> Iterator[tuple[str, str]]:
    """For each model that is known: its name, and what needs not be done again."""
    every = entries()
    for name in sorted({e.model for e in every if e.kind == "known"}):
        forms = [_facts(e.path / "held.json").get("about", {}) for e in every if (e.kind, e.model) == ("native", name)]
        packed = ", ".join(sorted(str(form.get("precision")) for form in forms))
        told = f"packed and checked for native in {packed}" if packed else "not packed yet"
        yield name, f"files and tokenizer known; {told}"


def tried_bits() -> Iterator[tuple[str, str]]:
    """For each kind of model that ran on a GPU: whether its rows were found to have the same bits in any pass."""
    for path in sorted((cache_folder().parent / "runtimes").glob("bits-*.json")):
        facts = _facts(path)
        same = "the same in any pass" if facts.get("same_bits") else "not the same in other passes: see near ties"
        yield str(facts.get("model", "a model")), f"{same}, on {facts.get('device', 'a GPU')}"


def _model(kind: str, path: Path) -> str:
    match kind:
        case "native":
            return str(_facts(path / "held.json").get("about", {}).get("model", ""))
        case "known":
            return str(_facts(path / "known.json").get("name", ""))
        case "openvino":
            return Path(str((_facts(path / "origin.json").get("model") or [""])[0])).name
        case "models":
            return path.name.rsplit("-", 2 if path.name.endswith("-gguf") else 1)[0]
    return ""


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
