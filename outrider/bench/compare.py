"""The comparison: every contender on every prompt, interleaved in one process so that a drift of the machine hits all.

Warm-up and prefill stand apart. Warm-up warms the machine, not the methods: contenders begin afresh after it and in
each round. A later turn is conditioned on the baseline's earlier answers. Statistics are the business of `figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.contenders import Contender, Run, Runner
from outrider.bench.machine import machine
from outrider.errors import InputError
from outrider.noise import fresh_seed
from outrider.params import SamplingParams
from outrider.prompts import Prompt

if TYPE_CHECKING:
    from outrider.api import Outrider

WARM_UP_TOKENS = 16
MOST_GAPS = 20  # first differences of a contender whose margin is looked up

Progress = Callable[[int, int, str], None]  # runs done, runs in all, what comes next


@dataclass(frozen=True, slots=True)
class Plan:
    params: SamplingParams = field(default_factory=SamplingParams)
    rounds: int = 1
    batch: int = 1
    raw: bool = False  # no chat template

    def __post_init__(self) -> None:
        for name in ("rounds", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; use 1 or more")
        if self.params.n != 1:
            raise InputError(f"a comparison takes one sample a prompt, not {self.params.n}; use rounds to repeat it")
        if self.params.seed is None:  # one for all contenders, or there would be nothing to compare
            object.__setattr__(self, "params", self.params.with_(seed=fresh_seed()))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first departs from the baseline's."""

    label: str
    unit: int  # which unit of the comparison
    member: int  # which prompt of its batch
    position: int  # tokens of the answer before it
    gap: float | None = None  # between the two likeliest tokens there, in nats; None where it was not looked up


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


@dataclass(slots=True)
class Comparison:
    contenders: list[Contender]  # the first is the baseline
    settings: dict[str, Any]
    machine: dict[str, Any]
    units: list[Unit] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)  # turns that grew past the context
    differences: list[Difference] = field(default_factory=list)
    complete: bool = False

    @property
    def baseline(self) -> str:
        return self.contenders[0].label


def compare(
    engine: Outrider, prompts: Sequence[Prompt], contenders: Sequence[Contender], plan: Plan,
    source: str = "built-in", on_progress: Progress | None = None,
) -> Comparison:  # fmt: skip
    """Run it all. An interrupt ends it early: what every contender had answered by then is kept."""
    _check(engine, prompts, plan)
    comparison = Comparison(list(contenders), _settings(engine, prompts, plan, source), machine())
    cases = batches(prompts, plan.batch)
    tracker = _Tracker(plan.rounds * len(contenders) * sum(max(p.rounds for p in case) for case in cases), on_progress)
    try:
        _warm_up(engine, cases[0], contenders, plan, tracker)
        for round_ in range(plan.rounds):
            runners = {c.label: c.begin() for c in contenders}
            for index, case in enumerate(cases):
                _run_case(engine, comparison, runners, plan, round_, index, case, tracker)
        comparison.complete = True
    except KeyboardInterrupt:
        pass
    comparison.differences = list(_differences(comparison))
    if comparison.complete and plan.params.greedy:
        _look_up_gaps(engine, comparison, plan)
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
    turned = [*labels[shift:], *labels[:shift]]
    return turned[::-1] if (index // len(labels)) % 2 else turned


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


def _check(engine: Outrider, prompts: Sequence[Prompt], plan: Plan) -> None:
    if not prompts:
        raise InputError("there are no prompts to compare on; give at least one")
    if not plan.raw and not getattr(engine.tokenizer, "chat_template", None):
        raise InputError(f"{engine.loaded.name} has no chat template; add --raw to use the prompts as they are")
    if plan.batch > engine.target.free_slots:
        raise InputError(
            f"a batch of {plan.batch} does not fit {engine.target.free_slots} slots; lower it or load with more slots"
        )
    for prompt in prompts:
        length = len(_encode(engine, prompt, (), plan.raw))
        if length >= engine.target.max_context:
            raise InputError(
                f"prompt {prompt.id} has {length} tokens but the context holds {engine.target.max_context}; "
                "leave it out or shorten it"
            )


def _encode(engine: Outrider, prompt: Prompt, answers: Sequence[str], raw: bool) -> list[int]:
    return engine.encode(prompt.raw(answers)) if raw else engine.encode_chat(prompt.conversation(answers))


def _warm_up(
    engine: Outrider, case: Sequence[Prompt], contenders: Sequence[Contender], plan: Plan, tracker: _Tracker
) -> None:
    params = plan.params.with_(max_new_tokens=min(WARM_UP_TOKENS, plan.params.max_new_tokens), min_new_tokens=0)
    ids = [_encode(engine, prompt, (), plan.raw) for prompt in case]
    for contender in contenders:
        tracker.doing(f"warm-up: {contender.label}")
        contender.begin()(ids, params)


def _run_case(
    engine: Outrider, comparison: Comparison, runners: dict[str, Runner], plan: Plan, round_: int, index: int,
    case: Sequence[Prompt], tracker: _Tracker,
) -> None:  # fmt: skip
    """Turn after turn; a unit is kept once every contender has answered it."""
    answers: list[list[str]] = [[] for _ in case]
    left_out: set[int] = set()
    for turn in range(max(prompt.rounds for prompt in case)):
        members, ids = [], []
        for i, prompt in enumerate(case):
            if prompt.rounds <= turn or i in left_out:
                continue
            encoded = _encode(engine, prompt, answers[i], plan.raw)
            if len(encoded) < engine.target.max_context:
                members.append(i)
                ids.append(encoded)
            else:
                left_out.add(i)
                comparison.skipped.append({"id": prompt.id, "turn": turn, "round": round_, "tokens": len(encoded)})
        if not members:
            tracker.advance(len(runners))
            continue
        names = tuple(case[i].id for i in members)
        runs: dict[str, Run] = {}
        for label in order(list(runners), len(comparison.units)):
            tracker.doing(f"{case[0].group} {names[0]}: {label}")
            runs[label] = runners[label](ids, plan.params)
            tracker.advance()
        comparison.units.append(Unit(index, names, case[0].group, turn, round_, tuple(ids), runs))
        for i, text in zip(members, runs[comparison.baseline].texts, strict=True):
            answers[i].append(text)


def _differences(comparison: Comparison) -> Iterator[Difference]:
    for index, unit in enumerate(comparison.units):
        base = unit.runs[comparison.baseline]
        for label, run in unit.runs.items():
            for member, (mine, theirs) in enumerate(zip(run.outputs, base.outputs, strict=True)):
                if run.comparable and mine != theirs:
                    yield Difference(label, index, member, _common(mine, theirs))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _look_up_gaps(engine: Outrider, comparison: Comparison, plan: Plan) -> None:
    """How close the two likeliest tokens were where an answer departed: a near tie, or a fault."""
    params = plan.params.with_(max_new_tokens=1, min_new_tokens=0, logprobs=min(8, engine.target.vocab_size))
    looked_up: dict[str, int] = {}
    for at, difference in enumerate(comparison.differences):
        unit = comparison.units[difference.unit]
        answer = unit.runs[comparison.baseline].outputs[difference.member]
        ids = [*unit.prompts[difference.member], *answer[: difference.position]]
        looked_up[difference.label] = looked_up.get(difference.label, 0) + 1
        if looked_up[difference.label] > MOST_GAPS or len(ids) >= engine.target.max_context:
            continue
        row = engine.engine.submit(ids, params, engine.recipe("plain")).result().logprobs
        best = sorted((processed for _, _, processed in row[0].top), reverse=True) if row else []
        if len(best) > 1:
            comparison.differences[at] = replace(difference, gap=best[0] - best[1])


def common_settings(engine: Outrider, params: SamplingParams) -> dict[str, Any]:
    """What every report of generated text states: where it ran and how it was sampled."""
    return {
        "device": str(engine.target.device),
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
    }


def _settings(engine: Outrider, prompts: Sequence[Prompt], plan: Plan, source: str) -> dict[str, Any]:
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
    }
