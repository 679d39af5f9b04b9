"""`outrider sample`: texts that a program, a corpus or a form lets pass: plainly, in rounds, or as particles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outrider.cli.options import ModelOptions, SamplingOptions
from outrider.cli.output import Json, check_json, emit, err, out, progress_bar
from outrider.cli.shell import STDOUT, on_interrupt
from outrider.core.errors import InputError

if TYPE_CHECKING:
    from outrider.core.generation import Generation
    from outrider.core.params import SamplingArguments, SamplingParams

CONDITION = "Condition"


def _condition(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=CONDITION, show_default=False, **more)


@dataclass(frozen=True, slots=True)
class ConditionOptions:
    """What texts have to obey besides a form, and how they are drawn."""

    predicate: Annotated[
        str | None, _condition("--predicate", metavar="FILE.py", help="A Python file: viable(text), complete(text).")
    ] = None
    predicate_seconds: Annotated[float, _condition("--predicate-seconds", help="Limit of one call; 1 without it.")] = 1
    within: Annotated[
        str | None, _condition("--within", metavar="STORE", help="Only stretches of this compact store's documents.")
    ] = None
    particles: Annotated[int | None, _condition("--particles", help="So many at once, weighed and resampled.")] = None
    threshold: Annotated[float, _condition("--threshold", help="Resample below this share of them; 0.5.")] = 0.5
    rounds: Annotated[int | None, _condition("--rounds", help="Rounds of --samples that learn (ASAp).")] = None
    patience: Annotated[int, _condition("--patience", help="End after so many rounds without progress; 0: never.")] = 0
    whole_trees: Annotated[bool, _condition("--whole-trees", help="Rounds learn from rejected drafts, too.")] = False

    def check(self, params: SamplingParams) -> None:
        """Before a model is loaded."""
        if self.particles is not None and self.rounds is not None:
            raise InputError("--particles and --rounds were both given; choose one way to draw")
        if not (params.form or self.predicate or self.within):
            raise InputError(
                "there is no condition; give --predicate, --within or a form such as --regex (see also: generate)"
            )
        if self.rounds is not None and self.predicate is not None:
            raise InputError("--rounds learns from masks; draw under a --predicate with --particles, or plainly")
        if params.greedy and (self.particles is not None):
            raise InputError("--particles need a temperature above 0; 1 is the model's distribution")

    def constraints(self, engine: Any) -> list[Any]:
        """Changes nothing; a form goes with the parameters."""
        found: list[Any] = []
        if self.within is not None:
            from outrider.constrain.substring import Substring
            from outrider.store.fm.files import open_compact
            from outrider.store.tokens import fingerprint

            store = open_compact(self.within, fingerprint(engine.tokenizer), engine.loaded.name)
            found.append(Substring(store, engine.target.vocab_size))
        if self.predicate is not None:
            from outrider.constrain.predicate.checked import Checked

            ends = engine.loaded.eos_ids
            found.append(Checked.of(self.predicate, engine.tokenizer, ends, seconds=self.predicate_seconds))
        return found


def sample(
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    json: Json = None,
    *,
    condition: ConditionOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
) -> None:
    """Draw texts under a condition; at temperature 1 unless told.

    A mask alone bends the model: it never sees that a legal beginning has no likely end. --rounds and --particles undo
    that: their texts come near the model's own, given that they are legal.
    """
    check_json(json)
    params = sampling.params(temperature=1.0)
    condition.check(params)
    from outrider.models.encoding import sampling_params

    many = max(condition.particles or 0, 8)
    with model.load(max_slots=many) as engine:
        given = condition.constraints(engine)
        ids = engine.encode(prompt) if raw else engine.encode_chat(prompt)
        params = sampling_params(engine.loaded, params, cast("SamplingArguments", sampling.extra))
        if condition.particles is not None:
            texts, facts = _particles(engine, ids, params, given, condition)
        elif condition.rounds is not None:
            texts, facts = _rounds(engine, ids, params, given, condition)
        else:
            texts, facts = _plain(engine, ids, params, given)
        for one in given:
            if hasattr(one, "calls"):
                facts["predicate_calls_per_token"] = one.calls / max(one.asked, 1)
                one.close()
    if json != STDOUT:
        for text in texts:
            if "weight" in text:
                out().print(f"[dim]{text['weight']:.3f}[/dim] ", end="")
            out().print(text["text"], markup=False, soft_wrap=True)
    interrupted = facts.pop("interrupted", False)
    err().print("  ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items()), style="dim")
    emit(json, {"model": model.model, "prompt": prompt, **facts, "texts": texts})
    if interrupted:
        raise typer.Exit(130)


def _plain(engine: Any, ids: list[int], params: SamplingParams, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    from outrider.search.submits import settled

    handle = engine.submit(ids, params, constraint=given)
    with on_interrupt(handle.cancel) as interrupted:
        generations, dead = settled(engine, handle)
    return [_as_dict(g) for g in generations], {"dead_ends": len(dead), "interrupted": bool(interrupted)}


def _particles(
    engine: Any, ids: list[int], params: SamplingParams, given: list[Any], condition: ConditionOptions
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    from outrider.search.smc import particles

    assert condition.particles is not None
    with progress_bar() as bar, on_interrupt(lambda: None) as interrupted:

        def told(done: int) -> bool:
            bar(done, params.max_new_tokens, "tokens")
            return bool(interrupted)

        found = particles(
            engine.engine, ids, replace(params, n=1), given, condition.particles, condition.threshold, told
        )  # fmt: skip
    texts = [{"weight": one.weight, **_as_dict(one.generation)} for one in found.texts]
    return texts, {
        "legal_probability": math.exp(found.log_normaliser), "log_legal_probability": found.log_normaliser,
        "effective_particles": found.effective, "resampled": found.resampled, "interrupted": bool(interrupted),
    }  # fmt: skip


def _rounds(
    engine: Any, ids: list[int], params: SamplingParams, given: list[Any], condition: ConditionOptions
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """The texts of the last round; those before it were drawn by looser bounds."""
    from outrider.constrain.asap import ASAp
    from outrider.search.aligned import rounds

    assert condition.rounds is not None
    texts: list[Any] = []
    bounds: list[float] = []
    dead, interrupted = 0, False
    learner = ASAp(condition.whole_trees)
    with progress_bar() as bar:
        try:
            for one in rounds(engine, ids, params, given, learner, condition.rounds, condition.patience):
                bar(one.number + 1, condition.rounds, f"at most {one.bound:.3g} legal")
                texts = [_as_dict(g) for g in one.generations] or texts
                bounds.append(one.bound)
                dead += one.dead_ends
        except KeyboardInterrupt:
            interrupted = True
    return texts, {"bounds": bounds, "rounds": len(bounds), "dead_ends": dead, "interrupted": interrupted}


def _as_dict(generation: Generation) -> dict[str, Any]:
    return generation.as_dict()


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.3g} to {value[-1]:.3g}" if value else "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
