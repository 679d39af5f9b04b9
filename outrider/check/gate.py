"""The losslessness gate: proves or refutes "same output" for one method on one model, and keeps the evidence.

Five parts (exhaustive, dependent, greedy, seeded, martingale); each names what it could not test. With planted bugs it
runs the clean parts first and then each bug, which some part must catch. An interrupt leaves what is known so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from outrider import methods, runtimes
from outrider.api import Outrider
from outrider.check import dependent, exhaustive
from outrider.check.bugs import Bug
from outrider.check.greedy import greedy_jobs, run_greedy
from outrider.check.martingale import Martingale, run_martingale
from outrider.check.reference import Answer, Job, Plain, RuntimePlain, Watch
from outrider.check.runs import Subject
from outrider.check.seeded import run_seeded, seeded_jobs
from outrider.check.ties import FORCED_TREES, Comparison, Precision, measure
from outrider.check.toy_methods import coupled_methods, one_a_family
from outrider.errors import InputError
from outrider.models import LoadedModel
from outrider.params import SamplingParams
from outrider.prompts import Prompt, built_in_prompts
from outrider.target.support import context_limit

PARTS = ("exhaustive", "dependent", "greedy", "seeded", "martingale")
# Of the martingale part, in turn. Warm texts tell most: p and q then share more of the vocabulary.
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_p": 0.95},
    {"temperature": 1.5},
)
ENOUGH_POWER = 0.99
CONTEXT = 1024  # longer prompts lose their beginning
MODELS_OWN = "float32"  # the precision in which a runtime says what the model itself says
SLOTS = 8  # fewer than there are texts in most runs, so that requests wait, join and leave


class Outcome(StrEnum):
    PASSED = "passed"
    REFUTED = "refuted"
    SKIPPED = "skipped"  # says nothing about this method; the summary says why
    VACUOUS = "vacuous"  # nothing spoke against it, but the method proposed nothing that could have
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is tested: texts and tokens a text."""

    prompts: int
    tokens: int
    forced_tokens: int
    seeded: int
    seeded_tokens: int
    sampled: int  # texts a round of the martingale part
    sampled_tokens: int
    rounds: int  # at most; it stops when its power suffices
    thorough: bool  # every shape and case of the exhaustive part, every method of the dependent one


QUICK = Size(3, 24, 20, 5, 20, 12, 48, 4, thorough=False)
FULL = Size(16, 128, 64, 20, 64, 16, 64, 8, thorough=True)


@dataclass(slots=True)
class Part:
    name: str
    outcome: Outcome = Outcome.INCOMPLETE
    summary: str = ""
    seconds: float = 0.0
    proposed: int | None = None  # candidates of the method's own that were looked at; None: the part looks at none
    _evidence: Callable[[], dict[str, Any]] = dict  # read when asked for, so that an interrupted part has its own too

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "outcome": str(self.outcome), "summary": self.summary, "proposed": self.proposed,
            "seconds": self.seconds, "evidence": self._evidence(),
        }  # fmt: skip


@dataclass(slots=True)
class Planted:
    """One bug and what became of it: `caught` by parts, `missed`, or `cannot show` with the reason."""

    bug: Bug
    outcome: str = "incomplete"
    reason: str = ""
    parts: list[Part] = field(default_factory=list)

    @property
    def caught_by(self) -> list[str]:
        return [part.name for part in self.parts if part.outcome is Outcome.REFUTED]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.bug.name, "what": self.bug.what, "outcome": self.outcome, "caught_by": self.caught_by,
            "reason": self.reason, "parts": [part.as_dict() for part in self.parts],
        }  # fmt: skip


@dataclass(slots=True)
class Report:
    settings: dict[str, Any]
    parts: list[Part] = field(default_factory=list)
    bugs: list[Planted] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if any(part.outcome is Outcome.REFUTED for part in self.parts):
            return "refuted"
        if any(planted.outcome == "missed" for planted in self.bugs):
            return "a planted bug was missed"
        if self.interrupted:
            return "incomplete"
        return "same output"

    @property
    def hint(self) -> str:
        """What a reader must know before believing the verdict; empty where the method was put to the test."""
        counts = [part.proposed for part in self.parts if part.proposed is not None]
        if not self.settings.get("speculates") or not counts or any(counts):
            return ""
        needs = self.settings["needs"]
        given = "other prompts (--prompts)" if needs == "nothing" else f"what it needs ({needs})"
        return (
            f"{self.settings['method']} proposed nothing in any run: plain decoding was tested, and the rule on trees "
            f"of the gate's own, but not its drafting; give it {given}"
        )

    @property
    def status(self) -> int:
        """What a process should exit with."""
        return 130 if self.interrupted else 0 if self.verdict == "same output" else 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict, "hint": self.hint, "settings": self.settings, "seconds": self.seconds,
            "parts": [part.as_dict() for part in self.parts], "bugs": [planted.as_dict() for planted in self.bugs],
        }  # fmt: skip


def check(
    loaded: LoadedModel,
    method: str,
    options: Mapping[str, Any] | None = None,
    *,
    prompts: Sequence[Prompt] | None = None,
    bugs: Sequence[Bug] = (),
    size: Size = FULL,
    seed: int = 1,
    watch: Watch = lambda label, tokens: None,
    runtime: str = runtimes.AUTO_NAME,
    precision: str | None = None,
) -> Report:
    """Run the gate. Ctrl-C ends it with what is known so far.

    A runtime in a precision that is not the model's own is held against its own plain decoding.
    """
    begun = time.perf_counter()
    report = Report({
        "method": method, "options": dict(options or {}), "model": loaded.name, "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.model.dtype).removeprefix("torch."), "device": str(loaded.device), "seed": seed,
        "size": {name: getattr(size, name) for name in size.__slots__}, "planted": [bug.name for bug in bugs],
    })  # fmt: skip
    limits = {"max_slots": SLOTS, "max_context": min(CONTEXT, context_limit(loaded.model.config)[0])}
    with Outrider(loaded, method, options, limits, strict=True, runtime=runtime, precision=precision) as engine:
        report.settings |= runtimes.ran(engine.target, loaded.model)
        try:
            gate = _Gate(engine, _prompt_ids(engine, prompts, size, seed), size, seed, watch)
            report.settings |= {
                "verifier": gate.subject.recipe.verifier.name, "lossless_by_registry": gate.subject.recipe.lossless,
                "prompts": [name for name, _ in gate.prompts], "speculates": gate.subject.speculates,
                "needs": methods.find(method).needs,
            }  # fmt: skip
            wanted = PARTS if not bugs else [part for part in PARTS if any(part in bug.parts for bug in bugs)]
            for name in wanted:
                gate.run(name, report.parts)
            for bug in bugs:
                report.bugs.append(Planted(bug))
                gate.plant(report.bugs[-1])
        except KeyboardInterrupt:
            report.interrupted = True
    report.seconds = time.perf_counter() - begun
    return report


class _Gate:
    """Holds what the parts share: plain decoding's answers, made once and before any bug is planted."""

    def __init__(
        self, engine: Outrider, prompts: list[tuple[str, tuple[int, ...]]], size: Size, seed: int, watch: Watch
    ) -> None:
        own = engine.target.traits.precision not in (None, MODELS_OWN)
        model, target = engine.loaded.model, engine.target
        plain = RuntimePlain(model, target) if own else Plain(model, target.vocab_size)
        self.subject = Subject(engine.engine, engine.recipe(), plain)
        self.prompts, self.size, self.seed, self.watch = prompts, size, seed, watch
        self._greedy: list[Answer] = []
        self._seeded: list[Answer] = []
        self._precision: Precision | None = None

    def run(self, name: str, into: list[Part]) -> Part:
        """Append the part before it runs, so that an interrupt leaves its evidence behind."""
        part = Part(name)
        into.append(part)
        begun = time.perf_counter()
        try:
            getattr(self, f"_run_{name}")(part)
        finally:
            part.seconds = time.perf_counter() - begun
        return part

    def plant(self, planted: Planted) -> None:
        recipe = self.subject.recipe
        planted.reason = planted.bug.cannot_show(recipe)
        if planted.reason:
            planted.outcome = "cannot show"
            return
        with planted.bug.planted(recipe, self.subject.engine.target):
            for name in planted.bug.parts:
                try:
                    self.run(name, planted.parts)
                except Exception as error:  # an assertion that fires is a catch as well
                    part = planted.parts[-1]
                    part.outcome, part.summary = Outcome.REFUTED, f"raised {type(error).__name__}: {error}"
        planted.outcome = "caught" if planted.caught_by else "missed"
        methods_own = [part for part in planted.parts if _shows_in_the_method(part)]
        if planted.caught_by and not methods_own:
            planted.reason = "showed in the runtime under the gate's forced trees only, not in the method's own runs"

    # The parts

    def _run_exhaustive(self, part: Part) -> None:
        results: list[exhaustive.Result] = []
        part._evidence = lambda: _exhaustive_evidence(results)
        verifier = self.subject.recipe.verifier
        self.watch(f"exhaustive: {verifier.name}", 0)
        if not self.size.thorough:
            results += exhaustive.quick(verifier)
        for law in sorted(verifier.honours) if self.size.thorough else ():
            self.watch(f"exhaustive: {verifier.name}, {law}", 0)
            results += exhaustive.exhaustive(verifier, [law])
        wrong = [r for r in results if not r.passed]
        outcomes, worst = sum(r.outcomes for r in results), max(r.difference for r in results)
        part.summary = (
            f"{verifier.name} rule, {len(results)} combinations, {outcomes} outcomes, largest difference {worst:.1e}"
            + (
                f"; {len(wrong)} above {exhaustive.TOLERANCE:.0e}, first {wrong[0].drawing} {wrong[0].shape}"
                if wrong
                else ""
            )
        )
        part.outcome = Outcome.REFUTED if wrong else Outcome.PASSED

    def _run_dependent(self, part: Part) -> None:
        results: list[dependent.Result] = []
        part._evidence = lambda: {"tolerance": exhaustive.TOLERANCE, "methods": [asdict(r) for r in results]}
        method, known = self.subject.recipe.name, coupled_methods()
        names = known if self.size.thorough else one_a_family()
        for name in [*names, *({method} & {*known} - {*names})]:
            self.watch(f"dependent: {name}", 0)
            results.append(dependent.examine(name, 2 if self.size.thorough else 1))
        part.summary = dependent.summary(results)
        part.outcome = Outcome.PASSED if all(r.passed for r in results) else Outcome.REFUTED

    def _run_greedy(self, part: Part) -> None:
        answers, precision = self._plain_greedy(), self._noise()
        self._compare(part, answers, precision, run_greedy)

    def _run_seeded(self, part: Part) -> None:
        verifier = self.subject.recipe.verifier
        if verifier.coupled:
            part.outcome = Outcome.SKIPPED
            part.summary = f"the {verifier.name} rule is coupled to the draft: see martingale"
            return
        precision = self._noise()
        if not self._seeded:
            self._seeded = self._answer(seeded_jobs(self.prompts, self.size.seeded, self.size.seeded_tokens, self.seed))
        self._compare(part, self._seeded, precision, run_seeded)

    def _compare(
        self, part: Part, answers: Sequence[Answer], precision: Precision,
        run: Callable[[Comparison, Subject, Sequence[Answer], int, Watch], None],
    ) -> None:  # fmt: skip
        comparison = Comparison(precision, answers)
        part._evidence = comparison.as_dict
        run(comparison, self.subject, answers, self.size.forced_tokens, self._labelled(part.name))
        part.summary, part.proposed = comparison.summary(self.subject.speculates), comparison.proposed
        part.outcome = Outcome.PASSED if comparison.passed else Outcome.REFUTED

    def _run_martingale(self, part: Part) -> None:
        sums = Martingale(self.subject.recipe.verifier.name)
        part._evidence = sums.as_dict
        coupled, watch = self.subject.recipe.verifier.coupled, self._labelled(part.name)
        for turn in range(self.size.rounds):
            run_martingale(sums, self.subject, self._sampled_jobs(turn), 2 if turn else None, watch)
            if not (coupled and sums.drafted) or sums.best_power >= ENOUGH_POWER:
                break
        speculates = self.subject.speculates
        part.summary, part.proposed = sums.summary(coupled, speculates), sums.offered
        silent = speculates and not sums.offered
        part.outcome = Outcome.REFUTED if not sums.passed else Outcome.VACUOUS if silent else Outcome.PASSED

    # What they share

    def _plain_greedy(self) -> list[Answer]:
        if not self._greedy:
            self._greedy = self._answer(greedy_jobs(self.prompts, self.size.tokens))
        return self._greedy

    def _noise(self) -> Precision:
        if self._precision is None:
            self._precision = measure(self.subject.plain, self._plain_greedy(), self._labelled("greedy"))
        return self._precision

    def _answer(self, jobs: Sequence[Job]) -> list[Answer]:
        watch = self._labelled("reference")
        return [self.subject.plain.decode(job, watch) for job in jobs]

    def _sampled_jobs(self, turn: int) -> list[Job]:
        jobs = []
        short = sorted(self.prompts, key=lambda named: len(named[1]))[: max(2, len(self.prompts) // 2)]
        for i in range(self.size.sampled):
            name, prompt = short[i % len(short)]
            seed = self.seed + 1000 * (turn + 1) + i
            params = SamplingParams(
                max_new_tokens=self.size.sampled_tokens, ignore_eos=True, seed=seed, **SAMPLED[i % len(SAMPLED)]
            )
            jobs.append(Job(f"{name}, seed {seed}", prompt, params))
        return jobs

    def _labelled(self, part: str) -> Watch:
        return lambda label, tokens: self.watch(f"{part}: {label}", tokens)


def planned_tokens(size: Size, bugs: Sequence[Bug]) -> int:
    """Roughly how many tokens a check makes, for a progress bar."""
    forced = 3 * size.prompts * size.forced_tokens
    greedy = 3 * size.prompts * size.tokens + forced
    seeded = size.seeded * (3 * size.seeded_tokens + 2 * size.forced_tokens)
    sampled = size.sampled * size.sampled_tokens * 2
    reference = 5 * size.prompts * size.tokens + size.seeded * size.seeded_tokens
    cost = {"exhaustive": 0, "dependent": 0, "greedy": greedy, "seeded": seeded, "martingale": sampled}
    return reference + sum(cost.values()) + sum(cost[part] for bug in bugs for part in bug.parts)


def _exhaustive_evidence(results: Sequence[exhaustive.Result]) -> dict[str, Any]:
    laws = sorted({str(r.law) for r in results})
    return {
        "tolerance": exhaustive.TOLERANCE, "combinations": len(results), "outcomes": sum(r.outcomes for r in results),
        "laws": [
            {"law": law, "combinations": sum(r.law == law for r in results),
             "largest_difference": max(r.difference for r in results if r.law == law)}
            for law in laws
        ],
        "failures": [
            {"law": str(r.law), "drawing": r.drawing, "shape": list(r.shape), "case": r.case,
             "difference": r.difference}
            for r in results if not r.passed
        ][:20],
    }  # fmt: skip


def _shows_in_the_method(part: Part) -> bool:
    """Whether anything but a forced drafter's run refuted."""
    if part.outcome is not Outcome.REFUTED:
        return False
    runs = [d["run"] for d in part._evidence().get("divergences", ()) if not d["tie"]]
    return not runs or any(not run.startswith(FORCED_TREES) for run in runs)


def _prompt_ids(
    engine: Outrider, prompts: Sequence[Prompt] | None, size: Size, seed: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Token ids of evenly spread prompts, each cut at the front to fit; random ids for a model without a tokenizer."""
    room = engine.target.max_context - max(size.tokens, size.seeded_tokens, size.sampled_tokens) - 1
    if room < 1:
        raise InputError(f"the context of {engine.target.max_context} tokens is too short for this check; try --quick")
    if engine.loaded.tokenizer is None:
        if prompts:
            raise InputError("this model has no tokenizer, so prompts as text cannot be used; leave out --prompts")
        rng = np.random.default_rng(seed)
        ids = [rng.integers(0, engine.target.vocab_size, 3 + 5 * i % 17).tolist() for i in range(size.prompts)]
        return [(f"random {i}", tuple(one[-room:])) for i, one in enumerate(ids)]
    given = list(built_in_prompts() if prompts is None else prompts)
    picked = given[:: max(1, len(given) // size.prompts)][: size.prompts]
    template = getattr(engine.loaded.tokenizer, "chat_template", None)
    return [(p.id, tuple(engine.encode(p.conversation() if template else p.raw())[-room:])) for p in picked]
