"""The journal of a bench: one JSON line for each thing measured, written at once, so that a killed run can go on.

A book is the part of the journal that belongs to one comparison; without a file it only remembers. Costs a write and
a flush for each answer, outside what is timed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from outrider.bench.contenders import Run
from outrider.core.errors import InputError
from outrider.core.generation import Stats

FORMAT = 1
FILE = "journal.jsonl"


class Key(NamedTuple):
    """Which unit of a comparison."""

    round: int
    case: int
    turn: int


@dataclass(frozen=True, slots=True)
class Unit:
    """One batch of prompts at one turn in one round, answered by every contender."""

    case: int  # which batch of prompts
    ids: tuple[str, ...]
    group: str
    turn: int
    round: int
    prompts: tuple[list[int], ...]  # token ids
    runs: dict[str, Run]  # by label, in the order they ran


@dataclass(frozen=True, slots=True)
class Failure:
    """A contender that did not answer, and why."""

    label: str
    error: str
    fault: bool = True  # False: it cannot do what was asked, and said so
    key: Key | None = None  # None: it did not even begin


class Journal:
    """Appends lines to a file. A line cut short by a kill is dropped when the file is read again."""

    def __init__(self, folder: Path | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / FILE
            self.lines = list(read_lines(path)) if path.exists() else []
            self._file = path.open("a", encoding="utf-8")
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                self._file.write("\n")
        except OSError as error:
            raise InputError(f"{folder}: cannot be used ({error.strerror}); choose another folder") from None

    def write(self, kind: str, **facts: Any) -> None:
        text = json.dumps({"kind": kind, **facts}, ensure_ascii=False)
        self.lines.append(json.loads(text))  # as it would be read again
        if self._file is not None:
            self._file.write(text + "\n")
            self._file.flush()

    def of(self, kind: str, section: str | None = None) -> list[dict[str, Any]]:
        return [
            line for line in self.lines if line["kind"] == kind and (section is None or line.get("section") == section)
        ]

    def claim(self, identity: Mapping[str, Any]) -> None:
        """The first call says what is measured; a later one must say the same or choose another folder."""
        before = self.of("bench")
        if not before:
            self.write("bench", format=FORMAT, identity=dict(identity))
            return
        known = before[0]["identity"]
        now = json.loads(json.dumps(identity))
        for name in {**known, **now}:
            if known.get(name) != now.get(name):
                raise InputError(
                    f"the folder holds a run with {name} {_short(known.get(name))}, this one has "
                    f"{_short(now.get(name))}; choose another --out, or ask for the same"
                )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a kill in the middle of a write
        if not isinstance(row, dict) or "kind" not in row:
            raise InputError(f"{path}: line {number} is no line of a bench journal; choose another folder")
        yield row


@dataclass(slots=True)
class Book:
    """What one comparison has measured so far."""

    journal: Journal = field(default_factory=Journal)
    section: str = ""
    _runs: dict[tuple[Key, str], Run] = field(default_factory=dict)
    _opened: set[Key] = field(default_factory=set)
    _gaps: dict[tuple[Any, ...], float] = field(default_factory=dict)
    noise: float | None = None
    complete: bool = False

    def __post_init__(self) -> None:
        for line in self.journal.of("run", self.section):
            self._runs[Key(*line["key"]), line["label"]] = run_from(line["run"])
        self._opened = {Key(*line["key"]) for line in self.journal.of("unit", self.section)}
        self._gaps = {tuple(line["place"]): line["gap"] for line in self.journal.of("gap", self.section)}
        for line in self.journal.of("noise", self.section):
            self.noise = line["bound"]
        self.complete = bool(self.journal.of("complete", self.section))

    def open(self, key: Key, unit: Unit) -> None:
        if key in self._opened:
            return
        self._opened.add(key)
        self.journal.write("unit", section=self.section, key=key, ids=unit.ids, group=unit.group, prompts=unit.prompts)

    def run(self, key: Key, label: str) -> Run | None:
        return self._runs.get((key, label))

    def keep(self, key: Key, label: str, run: Run) -> None:
        self._runs[key, label] = run
        self.journal.write("run", section=self.section, key=key, label=label, run=asdict(run))

    def fail(self, failure: Failure) -> None:
        self.journal.write("failure", section=self.section, **asdict(failure))

    def gap(self, place: tuple[Any, ...]) -> float | None:
        return self._gaps.get(place)

    def keep_gap(self, place: tuple[Any, ...], gap: float) -> None:
        self._gaps[place] = gap
        self.journal.write("gap", section=self.section, place=place, gap=gap)

    def keep_noise(self, bound: float) -> None:
        self.noise = bound
        self.journal.write("noise", section=self.section, bound=bound)

    def finish(self) -> None:
        if not self.complete:
            self.complete = True
            self.journal.write("complete", section=self.section)

    def units(self) -> Iterator[Unit]:
        """As they were measured."""
        runs: dict[Key, dict[str, Run]] = {}
        for (key, label), run in self._runs.items():
            runs.setdefault(key, {})[label] = run
        for line in self.journal.of("unit", self.section):
            key = Key(*line["key"])
            yield Unit(
                key.case, tuple(line["ids"]), line["group"], key.turn, key.round, tuple(line["prompts"]),
                runs.get(key, {}),
            )  # fmt: skip


def run_from(row: Mapping[str, Any]) -> Run:
    made = {"outputs": tuple(map(tuple, row["outputs"])), "texts": tuple(row["texts"]), "stats": Stats(**row["stats"])}
    return Run(**{**row, **made})


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
