"""Who takes part: named methods with options, or anything else that turns a batch of prompts into a timed run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from outrider import methods
from outrider._version import __version__
from outrider.bench.floor import runtime_traffic
from outrider.bench.machine import peak_bytes, reset_peak
from outrider.core.errors import InputError, UnknownName, did_you_mean
from outrider.core.generation import Generation, Stats
from outrider.core.params import SamplingParams
from outrider.core.protocols import Recipe, Remembers
from outrider.core.schedule import Terms

if TYPE_CHECKING:
    from outrider.api import Outrider

BASELINE = "plain"
OURS = "outrider"  # the runtime that is not a peer


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts answered by one contender."""

    outputs: tuple[tuple[int, ...], ...]  # token ids, one entry a prompt
    texts: tuple[str, ...]
    stats: Stats  # counts of all prompts together; times are the batch's, `rest_s` all that is no draft or verify
    steps: int  # steps of the batch; 0: not known
    total_s: float  # prefill included
    decoded: int  # tokens that the decode time made
    comparable: bool = True  # False: another draw from the same distribution, not the same tokens
    split: bool = True  # False: where the decode time went is not known
    peak_bytes: int | None = None  # of the process that ran it, weights included


Runner = Callable[[Sequence[list[int]], SamplingParams], Run]


@runtime_checkable
class Forgets(Protocol):
    """A runner with a memory that outlives a request."""

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    label: str
    method: str
    begin: Callable[[], Runner]  # fresh: nothing learnt in an earlier round is known to it
    options: Mapping[str, Any] = field(default_factory=dict)
    lossless: bool = True
    runtime: str = OURS
    baseline: str = BASELINE  # label of plain decoding by the same runtime
    facts: Mapping[str, Any] = field(default_factory=dict)  # dtype, weights, versions, bytes a step reads


@dataclass(frozen=True, slots=True)
class EngineRunner:
    """One of our methods, ready to run."""

    engine: Outrider
    recipe: Recipe

    def __call__(self, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
        return run_engine(self.engine, self.recipe, prompts, params)

    def forget(self) -> None:
        for part in (self.recipe.drafter, self.recipe.controller):
            if isinstance(part, Remembers):
                part.forget()


@dataclass(frozen=True, slots=True)
class Spec:
    """A method under a label of its own, so that one method can run with different options."""

    label: str
    method: str
    options: dict[str, Any]


def parse_specs(names: str, options: Mapping[str, Any] | None = None, lenient: Collection[str] = ()) -> list[Spec]:
    """`plain,prompt-lookup,wide=prompt-lookup` with options such as {"wide.budget": 32}. Plain is always the first.

    Names and options are checked here: a typo should not cost a model load. Those of `lenient` may lack what they need,
    such as a drafter: they were not asked for one by one.
    """
    pairs = [(label.strip(), method.strip() or label.strip()) for label, _, method in _split(names)]
    if not pairs:
        raise InputError("--methods names no method; write it as plain,prompt-lookup")
    if BASELINE not in [label for label, _ in pairs]:
        pairs.insert(0, (BASELINE, BASELINE))
    pairs.sort(key=lambda pair: pair[0] != BASELINE)  # stable
    labels = [label for label, _ in pairs]
    for label, method in pairs:
        if labels.count(label) > 1:
            raise InputError(f"{label} is there twice; give the second a label of its own, as in again={method}")
        if label == BASELINE and method != BASELINE:
            raise InputError(f"{BASELINE} is the baseline and cannot stand for {method}; choose another label")
    given = _by_label(options or {}, labels)
    specs = [Spec(label, method, given[label]) for label, method in pairs]
    for spec in specs:
        if spec.label in lenient and not spec.options:
            methods.find(spec.method)
        else:
            methods.check(spec.method, spec.options)
    return specs


def method_contender(engine: Outrider, spec: Spec) -> Contender:
    info = methods.find(spec.method)
    # Every option is named, defaults too: the engine then builds a recipe afresh instead of giving one it has.
    options = dataclasses.asdict(methods.parse_options(info, spec.options))

    def begin() -> Runner:
        return EngineRunner(engine, engine.recipe(spec.method, options))

    facts = {"version": __version__, **runtime_traffic(engine)}
    return Contender(spec.label, spec.method, begin, options, info.lossless, facts=facts)


def run_engine(engine: Outrider, recipe: Recipe, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
    """All prompts in one batch, timed by the wall clock: nothing that the engine does between steps goes uncounted.

    No run finds in the cache what another one has left there.
    """
    terms = Terms(cache_salt=token_hex(8))
    handles = [engine.engine.submit(ids, params, recipe, terms=terms) for ids in prompts]
    reset_peak(engine.target.device)
    try:
        begun = time.perf_counter()
        engine.step()
        first = handles[0].partial()[0].stats
        prefill_s = first.first_token_s - first.decode_s
        while not all(handle.done for handle in handles):
            engine.step()
        total_s = time.perf_counter() - begun
    finally:
        for handle in handles:  # an interrupt leaves nothing running
            handle.cancel()
    comparable = params.greedy or not recipe.verifier.coupled
    run = pooled([handle.result() for handle in handles], total_s, prefill_s, comparable)
    return dataclasses.replace(run, peak_bytes=peak_bytes(engine.target.device))


def pooled(generations: Sequence[Generation], total_s: float, prefill_s: float, comparable: bool) -> Run:
    """Counts are added up; times are those of the sequence that ran longest, for all began in the same step."""
    stats = Stats(method=generations[0].stats.method)
    for generation in generations:
        stats.add(generation.stats)
    longest = max((g.stats for g in generations), key=lambda s: s.steps)
    stats.first_token_s, stats.queue_s = longest.first_token_s, longest.queue_s
    stats.draft_s, stats.verify_s = longest.draft_s, longest.verify_s
    stats.rest_s = max(total_s - prefill_s - stats.draft_s - stats.verify_s, 0.0)
    outputs = tuple(tuple(g.token_ids) for g in generations)
    texts = tuple(g.text for g in generations)
    return Run(outputs, texts, stats, longest.steps, total_s, stats.new_tokens, comparable)


def _split(names: str) -> list[tuple[str, str, str]]:
    return [name.partition("=") for name in names.split(",") if name.strip()]


def _by_label(options: Mapping[str, Any], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    given: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for name, value in options.items():
        label, dot, key = name.partition(".")
        if not dot or not key:
            raise InputError(f"option {name}: say whose it is, as in {labels[-1]}.{name}={value}")
        if label not in given:
            hint = did_you_mean(label, labels)
            raise UnknownName(f"option {name}: {label!r} is not compared; {hint}compared are {', '.join(labels)}")
        given[label][key] = value
    return given
