"""The bench: suites x batch sizes x temperatures, each a comparison of the same systems, in one resumable run.

What is measured goes into the journal of a folder; results are made from the journal alone, while it runs or long
after, on this machine or another. `outrider compare` is the preset of one comparison without a folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.bench.compare import Comparison, Plan, Progress, compare, differences, per_group, settings
from outrider.bench.contenders import Contender, Runner
from outrider.bench.figures import result
from outrider.bench.floor import bandwidth
from outrider.bench.journal import FORMAT, Book, Failure, Journal, Key
from outrider.bench.machine import machine
from outrider.bench.steps import measured_steps
from outrider.bench.suites import Suite
from outrider.bench.ties import classified
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.runtime.choice import ran
from outrider.store.prompts import Prompt

if TYPE_CHECKING:
    from outrider.api import Outrider

STEP_ROWS = (1, 2, 4, 8, 16, 32)
SETTLE_S = 0.25  # threads of some runtimes spin for a fifth of a second after their last work


@dataclass(frozen=True, slots=True)
class Bench:
    """What is asked for."""

    suites: Sequence[Suite]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(seed=0))
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    rounds: int = 3
    limit: int | None = None  # prompts of each group; a batch size above it takes as many as it has room for
    memory: Literal["reset", "keep"] = "reset"
    raw: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise InputError(f"a bench takes the median of 3 rounds or more, not {self.rounds}; `compare` takes fewer")
        if not (self.suites and self.temperatures and self.batches):
            raise InputError("nothing to measure: give a suite, a batch size and a temperature")
        if min(self.batches) < 1:
            raise InputError(f"a batch size of {min(self.batches)} holds nothing; use 1 or more")
        names = [suite.name for suite in self.suites]
        if len(set(names)) < len(names):
            raise InputError(f"two suites have the same name ({', '.join(names)}); rename one of the files")
        list(self.sections())  # a temperature or limit that cannot be used is said now

    def sections(self) -> Iterator[Section]:
        for suite in self.suites:
            for batch in self.batches:
                prompts = per_group(suite.prompts, self.limit and max(self.limit, batch))
                for temperature in self.temperatures:
                    plan = Plan(
                        self.params.with_(temperature=temperature, seed=self.params.seed or 0), self.rounds, batch,
                        self.raw, self.memory, shuffled=not suite.ordered, keep_going=True, settle_s=SETTLE_S,
                    )  # fmt: skip
                    yield Section(suite.name, prompts, plan)


@dataclass(frozen=True, slots=True)
class Section:
    suite: str
    prompts: list[Prompt]
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.suite}, batch {self.plan.batch}, temperature {self.plan.params.temperature:g}"


def run(
    engine: Outrider, bench: Bench, contenders: Sequence[Contender], journal: Journal,
    on_progress: Progress | None = None,
) -> bool:  # fmt: skip
    """Measure what the journal lacks. Changes the journal; True when nothing is left to measure."""
    journal.claim(identity(engine, bench, contenders))
    if all(Book(journal, section.name).complete for section in bench.sections()):
        return True
    journal.write("machine", **machine())
    if not journal.of("steps"):
        with suppress(InputError):  # a cache too small to measure in is no reason not to compare
            journal.write("steps", **measured_steps(engine, STEP_ROWS, bench.batches[:1], repeats=2))
    for section in bench.sections():
        book = Book(journal, section.name)
        if book.complete:
            continue
        journal.write(
            "section", section=section.name, suite=section.suite,
            settings=settings(engine, section.prompts, section.plan, section.suite),
        )  # fmt: skip
        journal.write("bandwidth", bytes_per_s=bandwidth(engine.target.device))
        made = compare(
            engine, section.prompts, contenders, section.plan, section.suite, _prefixed(section.name, on_progress), book
        )
        journal.write("systems", systems=[_system(contender) for contender in contenders])
        for skip in made.skipped:
            journal.write("skipped", section=section.name, skip=skip)
        if not made.complete:
            return False
        journal.write("ended", section=section.name)
    journal.write("bandwidth", bytes_per_s=bandwidth(engine.target.device))
    return True


def results(journal: Journal) -> dict[str, Any]:
    """Everything a report shows, from the journal alone."""
    if not journal.of("bench") or not journal.of("machine"):
        raise InputError("the folder holds no journal of a bench; run one first: outrider bench run --out FOLDER")
    sections = []
    for line in {line["section"]: line for line in journal.of("section")}.values():
        made = _comparison(journal, line)
        sections.append({"name": line["section"], "suite": line["suite"], **result(made)})
    steps = journal.of("steps")
    return {
        "format": FORMAT,
        "identity": journal.of("bench")[0]["identity"],
        "machine": _machine(journal),
        "bandwidth": _bandwidth(journal),
        "sessions": len(journal.of("machine")),
        "complete": bool(sections) and all(section["complete"] for section in sections),
        "steps": {k: v for k, v in steps[0].items() if k != "kind"} if steps else None,
        "sections": sections,
    }


def _comparison(journal: Journal, line: dict[str, Any]) -> Comparison:
    name = line["section"]
    book = Book(journal, name)
    systems = journal.of("systems")
    rows = systems[-1]["systems"] if systems else journal.of("bench")[0]["identity"]["systems"]
    contenders = [Contender(begin=_not_here, **row) for row in rows]
    units = list(book.units())
    by_key = {Key(unit.round, unit.case, unit.turn): unit.runs for unit in units}
    failures = []
    for row in journal.of("failure", name):
        key = Key(*row["key"]) if row["key"] else None
        mended = all(row["label"] in runs for runs in ([by_key[key]] if key in by_key else by_key.values()))
        failure = Failure(row["label"], row["error"], row["fault"], key)
        if not mended and failure not in failures:
            failures.append(failure)
    needed = {c.label for c in contenders} - {failure.label for failure in failures}
    whole = [unit for unit in units if needed <= set(unit.runs)]
    made = Comparison(contenders, line["settings"], _machine(journal), whole, failures=failures)
    made.skipped = list({json.dumps(row["skip"]): row["skip"] for row in journal.of("skipped", name)}.values())
    made.bandwidth = _bandwidth(journal)
    made.complete = bool(journal.of("ended", name)) and len(whole) == len(units)
    made.differences = list(differences(made))
    made.differences = classified(made, book)
    return made


def identity(engine: Outrider, bench: Bench, contenders: Sequence[Contender]) -> dict[str, Any]:
    """What two calls must agree on to be one run."""
    params = bench.params
    return {
        "model": engine.loaded.fingerprint,
        "device": engine.target.device.type,
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        **ran(engine.target, engine.loaded.model),
        "max_context": engine.target.max_context,
        "suites": {suite.name: _digest(suite.prompts) for suite in bench.suites},
        "systems": [{k: v for k, v in _system(c).items() if k != "facts"} for c in contenders],
        "temperatures": list(bench.temperatures),
        "batches": list(bench.batches),
        "rounds": bench.rounds,
        "limit": bench.limit,
        "memory": bench.memory,
        "raw": bench.raw,
        "sampling": {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name != "temperature"},
    }


def _system(contender: Contender) -> dict[str, Any]:
    names = ("label", "method", "options", "lossless", "runtime", "baseline", "facts")
    return {name: getattr(contender, name) for name in names}


def _not_here() -> Runner:
    raise InputError("this system was measured elsewhere; it cannot run here")


def _machine(journal: Journal) -> dict[str, Any]:
    """Of the first session; the load is the highest of all."""
    lines = [{k: v for k, v in line.items() if k != "kind"} for line in journal.of("machine")]
    loads = [line["load"] for line in lines if line["load"] is not None]
    return {**lines[0], "load": max(loads, default=None)}


def _bandwidth(journal: Journal) -> float | None:
    """The highest seen: a floor is what cannot be beaten."""
    return max((line["bytes_per_s"] for line in journal.of("bandwidth")), default=None)


def _digest(prompts: Sequence[Prompt]) -> str:
    text = json.dumps([dataclasses.asdict(prompt) for prompt in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _prefixed(name: str, on_progress: Progress | None) -> Callable[[int, int, str], None] | None:
    if on_progress is None:
        return None
    return lambda done, total, what: on_progress(done, total, f"{name} · {what}" if what else "")


def read(folder: Path) -> dict[str, Any]:
    """Results of a folder; nothing is changed."""
    from outrider.bench.journal import FILE, read_lines

    journal = Journal()
    if not (folder / FILE).is_file():
        raise InputError(f"{folder}: there is no journal ({FILE}) in it; give the --out folder of a bench")
    journal.lines = list(read_lines(folder / FILE))
    return results(journal)
