"""The dependent part: two requests with one seed, of which the second's prompt holds the first's output.

Is the second still distributed as the target says? The whole loop runs on toy models with every outcome of the noise,
under the keys of the real streams: where two decisions have one key, the second gets the bits of the first. Given how
the first request went, the second must have the target's distribution. Proves the keys, for every method that runs
under a rule coupled to the draft; the invariant rule's noise is a function of the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.check.enumeration import Branches, branches
from outrider.check.exhaustive import CONTEXT, LIMIT, TOLERANCE, Sequences, distance
from outrider.check.toy_methods import TARGET, quiet, toy_recipe, toy_target
from outrider.core.engine import Engine, Handle
from outrider.core.sampling import History, SamplingParams

ASKED = (2, *CONTEXT)  # the rest of the first prompt: it repeats itself, so that there is something to copy
MORE = (0,)  # what the second request says after the first's output
PARAMS = SamplingParams(max_new_tokens=16, temperature=1.0, seed=0, prediction=(0, 1, 2))


@dataclass(frozen=True, slots=True)
class Result:
    """One method."""

    method: str
    verifier: str
    outcomes: int  # of both requests together
    difference: float  # largest between a distribution and the target's: the first's, and the second's after each first

    @property
    def passed(self) -> bool:
        return self.outcomes > 0 and self.difference <= TOLERANCE


def examine(name: str, budget: int = 2, more: tuple[int, ...] = MORE, limit: int = LIMIT) -> Result:
    """One step of each request, with at most so many candidates: what the first draws, the second draws as well."""
    seconds: dict[tuple[int, ...], Sequences] = {}
    count, rule = 0, ""

    def both(paths: Branches) -> tuple[tuple[int, ...], tuple[int, ...]]:
        nonlocal rule
        target = toy_target()
        recipe = toy_recipe(name, target, budget)
        rule = recipe.verifier.name
        engine = Engine(
            target, recipe, strict=True,
            make_noise=lambda seed, sample, stream, text, position: paths.noise(stream, text, position, sample),
        )  # fmt: skip
        first = _one_step(engine, (*CONTEXT, *ASKED))
        return first, _one_step(engine, (*CONTEXT, *ASKED, *first, *more))

    with quiet():
        for (first, second), probability in branches(both, limit, shared=True):
            probs = seconds.setdefault(first, {})
            probs[second] = probs.get(second, 0.0) + probability
            count += 1
    alone = _difference({first: sum(probs.values()) for first, probs in seconds.items()}, ASKED)
    given = max(_difference(probs, (*ASKED, *first, *more)) for first, probs in seconds.items())
    return Result(name, rule, count, max(alone, given))


def summary(results: Sequence[Result]) -> str:
    wrong, worst = [r for r in results if not r.passed], max(results, key=lambda r: r.difference)
    return (
        f"two requests with one seed, the second holding the first's output: {len(results)} methods, "
        f"{sum(r.outcomes for r in results)} outcomes, largest difference {worst.difference:.1e}"
        + (f" ({worst.method}); {len(wrong)} above {TOLERANCE:.0e}" if wrong else "")
    )


def _difference(probs: Sequences, after: tuple[int, ...]) -> float:
    total = sum(probs.values())
    given = {tokens: weight / total for tokens, weight in probs.items()}
    return distance(given, TARGET, max(map(len, given)), after)


def _one_step(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What one step says; the request ends there, and leaves before the next step."""
    handle = engine.submit(prompt, PARAMS)
    _in_float64(handle)
    engine.step()
    handle.cancel()
    return tuple(handle.sequences[0].history.output)


def _in_float64(handle: Handle) -> None:
    """The toys' rows as they are: rounding to float32 would hide small differences."""
    for sequence in handle.sequences:
        sequence.history = _Exact(sequence.prompt, sequence.params, sequence.vocab_size)


class _Exact(History):
    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        return logits.double()
