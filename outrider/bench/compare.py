"""The comparison: every contender on every prompt, interleaved so that a drift of the machine hits all.

One suite at one batch size and one temperature. Warm-up and prefill stand apart. Warm-up warms the machine, not the
methods: contenders begin afresh after it and in each round. A later turn is conditioned on the baseline's earlier
answers. What was measured goes into a `Book` at once; statistics are the business of `figures`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from outrider.bench.contenders import Contender, Forgets, Run, Runner
from outrider.bench.journal import Book, Failure, Key, Unit
from outrider.bench.machine import machine
from outrider.bench.ties import Difference, classified, look_up
from outrider.core.errors import InputError, OutriderError
from outrider.core.noise import fresh_seed
from outrider.core.params import SamplingParams
from outrider.runtime.choice import ran
from outrider.store.prompts import Prompt

if TYPE_CHECKING:
    from outrider.api import Outrider

T = TypeVar("T")
WARM_UP_TOKENS = 16
MAX_FAILURES = 2  # then a contender is left out of the rest

Progress = Callable[[int, int, str], None]  # runs done, runs in all, what comes next


class Unsupported(OutriderError):
    """A contender cannot do what is asked (a batch, a temperature); not a fault."""


@dataclass(frozen=True, slots=True)
class Plan:
    params: SamplingParams = field(default_factory=SamplingParams)
    rounds: int = 1
    batch: int = 1
    raw: bool = False  # no chat template
    memory: Literal["keep", "reset"] = "keep"  # what drafters learnt: kept within a round, or reset at every prompt
    shuffled: bool = False  # prompts and contenders in another order each round
    keep_going: bool = False  # without a contender that fails, and without prompts that do not fit
    settle_s: float = 0.0  # idle time between two runtimes: threads of the one before may still be spinning

    def __post_init__(self) -> None:
        for name in ("rounds", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; use 1 or more")
        if self.memory not in ("keep", "reset"):
            raise InputError(f"memory is {self.memory!r}; use keep or reset")
        if self.params.n != 1:
            raise InputError(f"a comparison takes one sample a prompt, not {self.params.n}; use rounds to repeat it")
        if self.params.seed is None:  # one for all contenders, or there would be nothing to compare
            object.__setattr__(self, "params", self.params.with_(seed=fresh_seed()))


@dataclass(slots=True)
class Comparison:
    contenders: list[Contender]  # the first is the baseline
    settings: dict[str, Any]
    machine: dict[str, Any]
    units: list[Unit] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)  # turns that grew past the context
    differences: list[Difference] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    bandwidth: float | None = None  # bytes a second, measured in the same run
    complete: bool = False

    @property
    def baseline(self) -> str:
        return self.contenders[0].label


def compare(
    engine: Outrider, prompts: Sequence[Prompt], contenders: Sequence[Contender], plan: Plan,
    source: str = "built-in", on_progress: Progress | None = None, book: Book | None = None,
) -> Comparison:  # fmt: skip
    """Run it all, less what the book holds already. An interrupt ends it early: what all had answered is kept."""
    book = book or Book()
    prompts, skipped, lengths = _fitting(engine, prompts, plan)
    comparison = Comparison(list(contenders), settings(engine, prompts, plan, source), machine(), skipped=skipped)
    cases = batches(prompts, plan.batch)
    total = plan.rounds * len(contenders) * sum(max(p.rounds for p in case) for case in cases)
    race = _Race(engine, comparison, plan, book, _Tracker(total, on_progress))
    try:
        if not book.complete:
            race.warm_up(cases[0])
            race.prepare(lengths)
        for round_ in range(plan.rounds):
            race.begin(round_)
            for index in _shuffled(range(len(cases)), round_) if plan.shuffled else range(len(cases)):
                race.run(round_, index, cases[index])
        comparison.complete = True
    except KeyboardInterrupt:
        pass
    comparison.differences = list(differences(comparison))
    if comparison.complete and plan.params.greedy:
        look_up(engine, comparison, plan.params, book)
    comparison.differences = classified(comparison, book)
    if comparison.complete and not any(failure.fault for failure in comparison.failures):
        book.finish()
    return comparison


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of one group together, `size` at a time, in the order their first one stands in."""
    filling: dict[str, list[Prompt]] = {}
    out: list[list[Prompt]] = []
    for prompt in prompts:
        batch = filling.get(prompt.group)
        if batch is None or len(batch) == size:
            batch = filling[prompt.group] = []
            out.append(batch)
        batch.append(prompt)
    return out


def per_group(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each group."""
    if limit is not None and limit < 1:
        raise InputError(f"a limit of {limit} prompts leaves none; give 1 or more")
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.group] = taken.get(prompt.group, 0) + 1
        if limit is None or taken[prompt.group] <= limit:
            kept.append(prompt)
    return kept


def order(labels: Sequence[str], index: int) -> list[str]:
    """Rotated unit by unit, so that each comes first equally often; backwards in every other cycle, so that each
    follows each."""
    shift = index % len(labels)
    rotated = [*labels[shift:], *labels[:shift]]
    return rotated[::-1] if (index // len(labels)) % 2 else rotated


@dataclass(slots=True)
class _Tracker:
    total: int
    report: Progress | None
    done: int = 0

    def doing(self, what: str) -> None:
        if self.report:
            self.report(self.done, self.total, what)

    def advance(self, runs: int = 1) -> None:
        self.done += runs
        self.doing("")


@dataclass(slots=True)
class _Race:
    """The state of a comparison while it runs."""

    engine: Outrider
    comparison: Comparison
    plan: Plan
    book: Book
    tracker: _Tracker
    runners: dict[str, Runner] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)  # failed for good
    last_runtime: str = ""

    def warm_up(self, case: Sequence[Prompt]) -> None:
        params = self.plan.params
        params = params.with_(max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens), min_new_tokens=0)
        ids = [_encode(self.engine, prompt, (), self.plan.raw) for prompt in case]
        for contender in self.comparison.contenders:
            self.tracker.doing(f"warm-up: {contender.label}")
            try:
                contender.begin()(ids, params)
            except Exception as error:
                self._failed(contender.label, None, error)
                self.left_out.add(contender.label)

    def prepare(self, lengths: Sequence[int]) -> None:
        """What a process reaches that runs for long, so that it does not come about in the middle of a round."""
        self.tracker.doing("warm-up: steps")
        self.engine.prepare([length + self.plan.params.max_new_tokens for length in lengths])

    def begin(self, round_: int) -> None:
        """Afresh: nothing learnt in an earlier round is known."""
        contenders = [c for c in self.comparison.contenders if c.label not in self.left_out]
        self.labels = [c.label for c in contenders]
        if self.plan.shuffled:
            self.labels = _shuffled(self.labels, round_)
        self.runners = {}
        if not self.book.complete:
            for contender in contenders:
                self._begin(contender)

    def run(self, round_: int, index: int, case: Sequence[Prompt]) -> None:
        """Turn after turn; a unit is kept once every contender has answered it."""
        answers: list[list[str]] = [[] for _ in case]
        too_long: set[int] = set()
        comparison = self.comparison
        for turn in range(max(prompt.rounds for prompt in case)):
            members, ids = [], []
            for i, prompt in enumerate(case):
                if prompt.rounds <= turn or i in too_long:
                    continue
                encoded = _encode(self.engine, prompt, answers[i], self.plan.raw)
                if len(encoded) < self.engine.target.max_context:
                    members.append(i)
                    ids.append(encoded)
                else:
                    too_long.add(i)
                    skip = {"id": prompt.id, "turn": turn, "round": round_, "tokens": len(encoded)}
                    comparison.skipped.append(skip)
            if not members:
                self.tracker.advance(len(self.labels))
                continue
            key = Key(round_, index, turn)
            unit = Unit(index, tuple(case[i].id for i in members), case[0].group, turn, round_, tuple(ids), {})
            self.book.open(key, unit)
            self._answer(key, unit)
            comparison.units.append(unit)
            for i, text in zip(members, unit.runs[comparison.baseline].texts, strict=True):
                answers[i].append(text)

    def _answer(self, key: Key, unit: Unit) -> None:
        if self.plan.memory == "reset":
            for runner in self.runners.values():
                if isinstance(runner, Forgets):
                    runner.forget()
        by_label = {c.label: c for c in self.comparison.contenders}
        for label in order(self.labels, len(self.comparison.units)):
            self.tracker.doing(f"{unit.group} {unit.ids[0]}: {label}")
            run = self.book.run(key, label) or self._measure(key, unit, by_label[label])
            if run is not None:
                unit.runs[label] = run
            self.tracker.advance()

    def _measure(self, key: Key, unit: Unit, contender: Contender) -> Run | None:
        label = contender.label
        if label in self.left_out or (label not in self.runners and not self._begin(contender)):
            return None
        if self.plan.settle_s and self.last_runtime not in ("", contender.runtime):
            time.sleep(self.plan.settle_s)
        self.last_runtime = contender.runtime
        try:
            run = self.runners[label](list(unit.prompts), self.plan.params)
        except Exception as error:
            self._failed(label, key, error)
            del self.runners[label]
            return None
        self.book.keep(key, label, run)
        return run

    def _begin(self, contender: Contender) -> bool:
        try:
            self.runners[contender.label] = contender.begin()
        except Exception as error:
            self._failed(contender.label, None, error)
            return False
        return True

    def _failed(self, label: str, key: Key | None, error: Exception) -> None:
        """Said and left out, where the plan is to go on; the baseline's failure ends everything."""
        if not self.plan.keep_going or label == self.comparison.baseline:
            raise error
        failure = Failure(label, " ".join(str(error).split()) or repr(error), not isinstance(error, Unsupported), key)
        self.comparison.failures.append(failure)
        self.book.fail(failure)
        if not failure.fault or sum(f.label == label for f in self.comparison.failures) >= MAX_FAILURES:
            self.left_out.add(label)


def _fitting(
    engine: Outrider, prompts: Sequence[Prompt], plan: Plan
) -> tuple[list[Prompt], list[dict[str, Any]], list[int]]:
    """What fits the context, what does not, and the tokens of what does."""
    if not prompts:
        raise InputError("there are no prompts to compare on; give at least one")
    if not plan.raw and not getattr(engine.tokenizer, "chat_template", None):
        raise InputError(f"{engine.loaded.name} has no chat template; add --raw to use the prompts as they are")
    if plan.batch > engine.target.free_slots:
        raise InputError(
            f"a batch of {plan.batch} does not fit {engine.target.free_slots} slots; lower it or load with more slots"
        )
    kept, skipped, lengths = [], [], []
    for prompt in prompts:
        length = len(_encode(engine, prompt, (), plan.raw))
        if length < engine.target.max_context:
            kept.append(prompt)
            lengths.append(length)
            continue
        skipped.append({"id": prompt.id, "turn": 0, "round": 0, "tokens": length})
        if not plan.keep_going or len(skipped) == len(prompts):
            raise InputError(
                f"prompt {prompt.id} has {length} tokens but the context holds {engine.target.max_context}; "
                "leave it out or shorten it"
            )
    return kept, skipped, lengths


def _encode(engine: Outrider, prompt: Prompt, answers: Sequence[str], raw: bool) -> list[int]:
    return engine.encode(prompt.raw(answers)) if raw else engine.encode_chat(prompt.conversation(answers))


def _shuffled(items: Iterable[T], round_: int) -> list[T]:
    """The same in every run: a resumed one must meet the same order."""
    out = list(items)
    random.Random(round_).shuffle(out)
    return out


def differences(comparison: Comparison) -> Iterator[Difference]:
    for index, unit in enumerate(comparison.units):
        base = unit.runs[comparison.baseline]
        for label, run in unit.runs.items():
            for member, (mine, theirs) in enumerate(zip(run.outputs, base.outputs, strict=True)):
                if run.comparable and mine != theirs:
                    yield Difference(label, index, member, _common(mine, theirs))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def common_settings(engine: Outrider, params: SamplingParams) -> dict[str, Any]:
    """What every report of generated text states: where it ran and how it was sampled."""
    return {
        "device": str(engine.target.device),
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        **ran(engine.target, engine.loaded.model),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
    }


def settings(engine: Outrider, prompts: Sequence[Prompt], plan: Plan, source: str) -> dict[str, Any]:
    groups: dict[str, int] = {}
    for prompt in prompts:
        groups[prompt.group] = groups.get(prompt.group, 0) + 1
    name = engine.loaded.name
    params = plan.params
    return {
        "model": Path(name).name if Path(name).is_absolute() else name,
        "prompts": source,
        "groups": groups,
        **common_settings(engine, params),
        "ignore_eos": params.ignore_eos,
        "rounds": plan.rounds,
        "batch": plan.batch,
        "raw": plan.raw,
        "memory": plan.memory,
        "shuffled": plan.shuffled,
    }
