"""The losslessness gate: proves or refutes "same output" for one method on one model, and keeps the evidence.

Five parts (exhaustive, dependent, greedy, seeded, martingale); each names what it could not test. With planted bugs it
runs the clean parts first and then each bug, which some part must catch. An interrupt leaves what is known so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outrider import methods
from outrider.api import Outrider
from outrider.check import dependent, exhaustive
from outrider.check.bugs import Bug
from outrider.check.forms import Forms, find_form, formed
from outrider.check.greedy import greedy_jobs, run_greedy
from outrider.check.martingale import Martingale, run_martingale
from outrider.check.reference import Answer, Job, Plain, RuntimePlain, Watch
from outrider.check.report import GatePart, Outcome, Planted, Report
from outrider.check.runs import Subject
from outrider.check.seeded import run_seeded, seeded_jobs
from outrider.check.ties import FORCED_TREES, WIDTHS, Comparison, Precision, measure, no_noise
from outrider.check.toy_methods import coupled_methods, one_a_family
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.models import LoadedModel
from outrider.runtime import choice
from outrider.runtime.support import context_limit
from outrider.store.prompts import Prompt, built_in_prompts

PARTS = ("exhaustive", "dependent", "greedy", "seeded", "martingale")
PROVES = {  # in the words of the progress bar
    "exhaustive": "the rule keeps the distribution",
    "dependent": "so do requests that share a seed",
    "reference": "what plain decoding says",
    "greedy": "greedy text is the same",
    "seeded": "sampled text is the same",
    "martingale": "samples have the distribution",
}
# Settings of the martingale part. High temperatures tell most: p and q then share more of the vocabulary.
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_p": 0.95},
    {"temperature": 1.5},
)
ENOUGH_POWER = 0.99
NOISE_TEXTS = 4  # that are scored in other widths: two thousand rows of a full check; more can only raise the bound
CONTEXT = 1024  # longer prompts lose their beginning
MODELS_PRECISION = "float32"  # the precision in which a runtime says what the model itself says
SLOTS = 8  # fewer than there are texts in most runs, so that requests wait, join and leave


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
    runtime: str = choice.AUTO_NAME,
    precision: str | None = None,
    constraint: str | None = None,
) -> Report:
    """Run the gate. Ctrl-C ends it with what is known so far.

    A runtime in a precision that is not the model's own is held against its own plain decoding, as is one whose rows
    have the same bits in any pass in half precision: there any difference refutes. `constraint` names a form (json,
    regex, copy) that all texts of a model have.
    """
    forms: Forms = find_form(constraint) if constraint else ()
    begun = time.perf_counter()
    report = Report({
        "method": method, "options": dict(options or {}), "model": loaded.name, "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.model.dtype).removeprefix("torch."), "device": str(loaded.device), "seed": seed,
        "size": {name: getattr(size, name) for name in size.__slots__}, "planted": [bug.name for bug in bugs],
        "constraint": constraint,
    })  # fmt: skip
    limits = {"max_slots": SLOTS, "max_context": min(CONTEXT, context_limit(loaded.model.config)[0])}
    with Outrider(loaded, method, options, limits, strict=True, runtime=runtime, precision=precision) as engine:
        report.settings |= choice.ran(engine.target, loaded.model)
        try:
            gate = _Gate(engine, _prompt_ids(engine, prompts, size, seed), size, seed, watch, forms)
            report.settings |= {
                "verifier": gate.subject.recipe.verifier.name, "lossless_by_registry": gate.subject.recipe.lossless,
                "same_bits": engine.target.traits.same_bits,
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
        self, engine: Outrider, prompts: list[tuple[str, tuple[int, ...]]], size: Size, seed: int, watch: Watch,
        forms: Forms,
    ) -> None:  # fmt: skip
        model, target = engine.loaded.model, engine.target
        self._noiseless = target.traits.same_bits and choice.ran(target, model)["precision"] != MODELS_PRECISION
        rounded = self._noiseless or target.traits.precision not in (None, MODELS_PRECISION)
        known = engine.loaded.eos_ids, engine.compile_form
        plain = RuntimePlain(model, target, *known) if rounded else Plain(model, target.vocab_size, *known)
        self.subject = Subject(engine.engine, engine.recipe(), plain)
        self.prompts, self.size, self.seed, self.watch, self.forms = prompts, size, seed, watch, forms
        self._greedy: list[Answer] = []
        self._seeded: list[Answer] = []
        self._precision: Precision | None = None

    def run(self, name: str, into: list[GatePart]) -> GatePart:
        """Append the part before it runs, so that an interrupt leaves its evidence behind."""
        part = GatePart(name)
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
        if planted.caught_by and not any(map(_shows_in_the_method, planted.parts)):
            planted.reason = "showed in the runtime under the gate's forced trees only, not in the method's own runs"

    # The parts

    def _run_exhaustive(self, part: GatePart) -> None:
        results: list[exhaustive.Result] = []
        part.read_evidence = lambda: exhaustive.evidence(results)
        verifier = self.subject.recipe.verifier
        self.watch(f"exhaustive: {verifier.name}", 0)
        if not self.size.thorough:
            results += exhaustive.quick(verifier)
        for honoured in sorted(verifier.honours) if self.size.thorough else ():
            self.watch(f"exhaustive: {verifier.name}, {honoured}", 0)
            results += exhaustive.exhaustive(verifier, [honoured])
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

    def _run_dependent(self, part: GatePart) -> None:
        results: list[dependent.Result] = []
        part.read_evidence = lambda: {"tolerance": exhaustive.TOLERANCE, "methods": [asdict(r) for r in results]}
        method, known = self.subject.recipe.name, coupled_methods()
        # A rule that is not coupled to the draft takes no part in what these prove: some of each family suffice.
        every = self.size.thorough and self.subject.recipe.verifier.coupled
        names = known if every else one_a_family()
        for name in [*names, *({method} & {*known} - {*names})]:
            self.watch(f"dependent: {name}", 0)
            results.append(dependent.examine(name, 2 if every else 1))
        part.summary = dependent.summary(results)
        part.outcome = Outcome.PASSED if all(r.passed for r in results) else Outcome.REFUTED

    def _run_greedy(self, part: GatePart) -> None:
        answers, precision = self._plain_greedy(), self._noise()
        self._compare(part, answers, precision, run_greedy)

    def _run_seeded(self, part: GatePart) -> None:
        verifier = self.subject.recipe.verifier
        if verifier.coupled:
            part.outcome = Outcome.SKIPPED
            part.summary = f"the {verifier.name} rule is coupled to the draft: see martingale"
            return
        precision = self._noise()
        if not self._seeded:
            jobs = seeded_jobs(self.prompts, self.size.seeded, self.size.seeded_tokens, self.seed)
            self._seeded = self._answer(formed(jobs, self.forms))
        self._compare(part, self._seeded, precision, run_seeded)

    def _compare(
        self, part: GatePart, answers: Sequence[Answer], precision: Precision,
        run: Callable[[Comparison, Subject, Sequence[Answer], int, Watch], None],
    ) -> None:  # fmt: skip
        comparison = Comparison(precision, answers)
        part.read_evidence = comparison.as_dict
        run(comparison, self.subject, answers, self.size.forced_tokens, self._labelled(part.name))
        part.summary, part.proposed = comparison.summary(self.subject.speculates), comparison.proposed
        part.outcome = Outcome.PASSED if comparison.passed else Outcome.REFUTED

    def _run_martingale(self, part: GatePart) -> None:
        sums = Martingale(self.subject.recipe.verifier.name)
        part.read_evidence = sums.as_dict
        coupled, watch = self.subject.recipe.verifier.coupled, self._labelled(part.name)
        for number in range(self.size.rounds):
            run_martingale(sums, self.subject, self._sampled_jobs(number), 2 if number else None, watch)
            if not (coupled and sums.drafted) or sums.best_power >= ENOUGH_POWER:
                break
        speculates = self.subject.speculates
        part.summary, part.proposed = sums.summary(coupled, speculates), sums.offered
        silent = speculates and not sums.offered
        part.outcome = Outcome.REFUTED if not sums.passed else Outcome.VACUOUS if silent else Outcome.PASSED

    # What they share

    def _plain_greedy(self) -> list[Answer]:
        if not self._greedy:
            self._greedy = self._answer(formed(greedy_jobs(self.prompts, self.size.tokens), self.forms))
        return self._greedy

    def _noise(self) -> Precision:
        if self._precision is None:
            answers = self._plain_greedy()[:NOISE_TEXTS]
            if self._noiseless:
                self._precision = no_noise(answers)
            else:
                self._precision = measure(self.subject.plain, answers, self._labelled("greedy"))
        return self._precision

    def _answer(self, jobs: Sequence[Job]) -> list[Answer]:
        watch = self._labelled("reference")
        return self.subject.plain.answers(jobs, watch)

    def _sampled_jobs(self, number: int) -> list[Job]:
        jobs = []
        short = sorted(self.prompts, key=lambda named: len(named[1]))[: max(2, len(self.prompts) // 2)]
        for i in range(self.size.sampled):
            name, prompt = short[i % len(short)]
            seed = self.seed + 1000 * (number + 1) + i
            params = SamplingParams(
                max_new_tokens=self.size.sampled_tokens, ignore_eos=True, seed=seed, **SAMPLED[i % len(SAMPLED)]
            )
            jobs.append(Job(f"{name}, seed {seed}", prompt, params))
        return formed(jobs, self.forms)

    def _labelled(self, part: str) -> Watch:
        return lambda label, tokens: self.watch(f"{part}: {label}", tokens)


def proved(label: str) -> str:
    """What a label that `watch` was told is about, as a sentence."""
    part, _, rest = label.partition(": ")
    return f"{PROVES[part]}: {rest}" if part in PROVES else label


def planned_tokens(size: Size, bugs: Sequence[Bug]) -> int:
    """Roughly how many tokens a check makes, for a progress bar."""
    forced = 3 * size.prompts * size.forced_tokens
    greedy = 3 * size.prompts * size.tokens + forced
    seeded = size.seeded * (3 * size.seeded_tokens + 2 * size.forced_tokens)
    sampled = size.sampled * size.sampled_tokens * 2
    again = len(WIDTHS) * min(size.prompts, NOISE_TEXTS)
    reference = (size.prompts + again) * size.tokens + size.seeded * size.seeded_tokens
    cost = {"exhaustive": 0, "dependent": 0, "greedy": greedy, "seeded": seeded, "martingale": sampled}
    return reference + sum(cost.values()) + sum(cost[part] for bug in bugs for part in bug.parts)


def _shows_in_the_method(part: GatePart) -> bool:
    """Whether anything but a forced drafter's run refuted."""
    if part.outcome is not Outcome.REFUTED:
        return False
    runs = [d["run"] for d in part.read_evidence().get("divergences", ()) if not d["tie"]]
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
