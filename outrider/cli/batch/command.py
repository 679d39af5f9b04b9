"""The command: what it is asked, the jobs of the file, and running them so that a kill loses nothing that has ended."""

from __future__ import annotations

import hashlib
import json as json_format
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli.options import ModelOptions, SamplingOptions
from outrider.cli.output import Json, check_json, emit, err, progress_bar
from outrider.cli.shell import forced, on_interrupt, resumable
from outrider.core.errors import InputError, OutriderError
from outrider.core.files import check_place, write_atomic

if TYPE_CHECKING:
    from outrider.core.generation import Generation
    from outrider.core.params import SamplingParams
    from outrider.store.prompts import Prompt

AHEAD = 4  # prompts that are submitted for each slot: enough that none is ever empty


def batch(
    prompts: Annotated[str, typer.Argument(metavar="IN.jsonl", help="A line each: prompt, turns or messages.")],
    results: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="A line each, in the same order.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the texts themselves: no chat template.")] = False,
    slots: Annotated[int | None, typer.Option("--slots", help="Sequences that run at once; else 8.")] = None,
    json: Json = None,
    *,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer a file of prompts, many at once.

    A line is {"prompt": "..."}, {"turns": [...]} (each is answered before the next) or {"messages": [...]}, with an id
    and sampling parameters of its own where it wants them, such as "max_new_tokens" or "seed". Results are kept as they
    come: after a kill the same command goes on where it was. A prompt that fails has its error in its line.
    """
    out = Path(results)
    check_json(json)
    check_place(out, results)
    jobs = read_jobs(prompts, sampling.params())
    folder = out.with_name(out.name + ".journal")
    if out.exists() and not folder.exists() and not forced():
        raise InputError(f"{results}: exists; choose another file, or add --force to replace it")
    from outrider.bench.journal import Journal

    with resumable(), model.load(**({} if slots is None else {"max_slots": slots})) as engine:
        journal = Journal(folder)
        identity = {"prompts": _digest(prompts), "model": model.model, "method": model.method, "raw": raw,
                    "sampling": repr(sampling)}  # fmt: skip
        journal.claim(identity)
        run = Batch(engine, jobs, journal, sampling.extra, raw)
        with on_interrupt(run.stop) as interrupted, progress_bar() as progress:
            run.run(progress)
        journal.close()
        if interrupted:
            raise KeyboardInterrupt
        lines = run.lines()
        write_atomic(out, "".join(json_format.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        shutil.rmtree(folder, ignore_errors=True)
    summary = {"model": model.model, "method": model.method, "prompts": prompts, "results": results, **run.summary()}
    err().print(_table(summary))
    emit(json, summary)
    if failed := summary["failed"]:
        raise OutriderError(f"{failed} of {len(jobs)} prompts failed; their lines in {results} say why")


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the file."""

    prompt: Prompt
    params: SamplingParams


def read_jobs(path: str, params: SamplingParams) -> list[Job]:
    """Every line checked before a model is loaded."""
    from outrider.store.prompts import read_prompts, read_text

    known, found = set(params.__slots__), read_prompts(path)
    rows = [(i, line) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    jobs = []
    for (number, line), prompt in zip(rows, found, strict=True):
        changes = {name: value for name, value in json_format.loads(line).items() if name in known}
        try:
            jobs.append(Job(prompt, params.with_(**changes)))
        except InputError as error:
            raise InputError(f"{path}: line {number}: {error}") from None
        if prompt.rounds > 1 and jobs[-1].params.n > 1:
            raise InputError(f"{path}: line {number} has turns to be answered one by one; leave out n, or --samples")
    return jobs


@dataclass(slots=True)
class Batch:
    """Changes state: jobs that the journal has no result of run, as many at once as keep every slot busy."""

    engine: Any
    jobs: Sequence[Job]
    journal: Any
    extra: dict[str, Any]
    raw: bool = False
    _running: dict[int, tuple[Any, list[str]]] = field(default_factory=dict)  # handle and answers so far, by line
    _stopped: bool = False
    _seconds: float = 0.0
    _fresh_tokens: int = 0

    def run(self, progress: Callable[[int, int, str], None]) -> None:
        begun = time.perf_counter()
        if not self.journal.of("seed"):
            from outrider.core.noise import fresh_seed  # with torch: not for `--help`

            self.journal.write("seed", seed=fresh_seed())
        done = {line["line"] for line in self.journal.of("result")}
        left = iter([i for i in range(len(self.jobs)) if i + 1 not in done])
        finished, most = len(done), AHEAD * self.engine.target.traits.slots
        progress(finished, len(self.jobs), "")
        self._fill(left, most)
        try:
            while self._running and not self._stopped:
                self.engine.step()
                for i in [i for i, (handle, _) in self._running.items() if handle.done]:
                    if self._end(i):
                        finished += 1
                        progress(finished, len(self.jobs), f"{self._fresh_tokens} tokens")
                self._fill(left, most)
        finally:
            self._seconds = time.perf_counter() - begun
            for handle, _ in self._running.values():
                handle.cancel()

    def stop(self) -> None:
        """Before the next step; what has ended is kept."""
        self._stopped = True

    def _fill(self, left: Iterator[int], most: int) -> None:
        while len(self._running) < most and (i := next(left, None)) is not None:
            self._ask(i, [])

    def _ask(self, i: int, answers: list[str]) -> None:
        job = self.jobs[i]
        asked: Any = job.prompt.raw(answers) if self.raw else job.prompt.conversation(answers)
        params = job.params
        if params.seed is None:  # the same after a kill
            params = params.with_(seed=self.journal.of("seed")[0]["seed"] + i)
        try:
            self._running[i] = self.engine.submit(asked, params, **self.extra), answers
        except InputError as error:
            self._keep(i, {"error": str(error)})

    def _end(self, i: int) -> bool:
        """Whether the job is done, and not only one of its turns."""
        handle, answers = self._running.pop(i)
        try:
            made: list[Generation] = handle.results()
        except Exception as error:
            self._keep(i, {"error": " ".join(str(error).split()) or type(error).__name__})
            return True
        self._fresh_tokens += sum(len(g.token_ids) for g in made)
        answers = [*answers, made[0].text]
        if len(answers) < self.jobs[i].prompt.rounds:
            self._ask(i, answers)
            return i not in self._running
        turns = {"turns": answers} if len(answers) > 1 else {}
        each = [{"text": g.text, "finish_reason": str(g.finish_reason), "seed": g.seed, "tokens": len(g.token_ids)}
                for g in made]  # fmt: skip
        prompt_tokens = made[0].stats.prompt_tokens
        shown = each[0] if len(each) == 1 else {"samples": each}
        self._keep(i, {**shown, **turns, "prompt_tokens": prompt_tokens})
        return True

    def _keep(self, i: int, result: dict[str, Any]) -> None:
        self.journal.write("result", line=i + 1, result={"id": self.jobs[i].prompt.id, **result})

    def lines(self) -> list[dict[str, Any]]:
        """Results in the order of the prompts."""
        by_line = {line["line"]: line["result"] for line in self.journal.of("result")}
        return [by_line[i + 1] for i in range(len(self.jobs))]

    def summary(self) -> dict[str, Any]:
        lines = self.lines()
        tokens = sum(one["tokens"] for line in lines for one in line.get("samples", [line]) if "tokens" in one)
        return {
            "lines": len(lines), "failed": sum("error" in line for line in lines), "tokens": tokens,
            "seconds": self._seconds, "steps": self.engine.engine.steps,
            "tokens_per_s": self._fresh_tokens / self._seconds if self._seconds else 0.0,
        }  # fmt: skip


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _table(summary: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("prompts", f"{summary['lines']}, of which {summary['failed']} failed")
    table.add_row("tokens", str(summary["tokens"]))
    table.add_row("this run", f"{summary['seconds']:.1f} s, {summary['tokens_per_s']:.0f} tokens/s, "
                  f"{summary['steps']} steps")  # fmt: skip
    return table
