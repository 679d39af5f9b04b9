"""Options that several commands share, in groups: which model and method, and how to sample."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.output import err
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams

if TYPE_CHECKING:
    from outrider.store.prompts import Prompt

MODEL, SAMPLING, FORM = "Model and method", "Sampling", "Form of the text"


def _model(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MODEL, **more)


def _sampling(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING, show_default=False, **more)


def _form(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=FORM, show_default=False, **more)


Runtime = Annotated[str, _model("--runtime", help="What runs the model: auto, or a name that `outrider doctor` lists.")]
Precision = Annotated[
    str | None, _model("--precision", help="Of the weights, where the runtime has several: int8, ...")
]
Model = Annotated[str, typer.Option("--model", "-m", help="smollm2 (embedded), a hub id, a folder or a .gguf file.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: Annotated[str, _model("--model", "-m", help="smollm2 (embedded), a hub id, a folder or a .gguf file.")] = (
        "smollm2"
    )
    method: Annotated[str, _model("--method", help="A name of the table that `outrider methods` prints.")] = "mix"
    option: Annotated[list[str] | None, _model("--option", "-o", help="name=value for the method; repeatable.")] = None
    draft: Annotated[
        str | None,
        _model("--draft", metavar="MODEL", help="A smaller model to draft with: short for -o draft=MODEL."),
    ] = None
    device: Annotated[str | None, _model("--device", help="cpu, cuda, cuda:1, ...")] = None
    dtype: Annotated[str | None, _model("--dtype", help="float32, bfloat16 or float16.")] = None
    revision: Annotated[str | None, _model("--revision", help="Branch, tag or commit of a hub model.")] = None
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", help="Run code that comes with a hub model.")] = (
        False
    )
    runtime: Runtime = "auto"
    precision: Precision = None
    tensor_parallel: Annotated[
        int, _model("--tensor-parallel", metavar="N", help="Spread the model over N processes, a GPU each.")
    ] = 1
    memory: Annotated[
        str | None, _model("--memory", metavar="FILE", help="Keep what drafters learn in this file, and use it.")
    ] = None

    def load(self, **more: Any) -> Any:
        """The engine, ready to use; a context manager. `more` are limits."""
        import outrider

        return outrider.load(**self.arguments(**more))

    def arguments(self, **more: Any) -> dict[str, Any]:
        """What `outrider.load` is to be called with, as plain values that can be sent to another process."""
        options = parse_options(self.option) | ({} if self.draft is None else {"draft": self.draft})
        from outrider import methods

        methods.check(self.method, options)
        names = (
            "model", "method", "device", "dtype", "revision", "trust_remote_code", "memory", "runtime", "precision",
            "tensor_parallel",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "options": options, **more}


@dataclass(frozen=True, slots=True)
class ModelWithPage(ModelOptions):
    """Of a command whose `-o` is a file."""

    option: Annotated[list[str] | None, _model("--option", help="name=value for the method; repeatable.")] = None


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """The model of a measurement, whose methods are named apart from it."""

    model: Model = "smollm2"
    device: Device = None
    dtype: Dtype = None
    runtime: Runtime = "auto"
    precision: Precision = None

    def load(self, **more: Any) -> Any:
        """The engine, decoding plainly; a context manager."""
        import outrider

        return outrider.load(
            self.model, method="plain", device=self.device, dtype=self.dtype, runtime=self.runtime,
            precision=self.precision, **more,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The prompts of a measurement."""

    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", help="JSONL with prompt, turns or messages; else built in."),
    ] = None
    limit: Annotated[int | None, typer.Option("--limit", help="First so many prompts of each group.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False

    def chosen(self) -> list[Prompt]:
        from outrider.bench.compare import per_group
        from outrider.store.prompts import built_in_prompts, read_prompts

        return per_group(read_prompts(self.prompts) if self.prompts else built_in_prompts(), self.limit)

    @property
    def source(self) -> str:
        """What a report calls them."""
        return Path(self.prompts).name if self.prompts else "built-in"


@dataclass(frozen=True, slots=True)
class StyleOptions:
    """A style prior: a change of the model's distribution, so it is announced wherever it is used."""

    style: Annotated[
        str | None, _sampling("--style", metavar="FILE", help="CHANGES the model: lean towards this text's n-grams.")
    ] = None
    style_strength: Annotated[float | None, _sampling("--style-strength", help="0 is none; 0.1 without it.")] = None

    def check(self) -> None:
        """Before a model is loaded."""
        if self.style is None and self.style_strength is not None:
            raise InputError("--style-strength was given without --style; name the text file of the style")
        if self.style is not None and not Path(self.style).exists():
            raise InputError(f"--style {self.style}: no such file; give an existing text file or a folder of them")
        if self.style_strength is not None and not (math.isfinite(self.style_strength) and self.style_strength >= 0):
            raise InputError(f"--style-strength {self.style_strength}: use 0 or more, such as 0.1")

    def constraint(self, engine: Any) -> Any:
        """The prior, or None; says on stderr that the distribution is changed."""
        if self.style is None:
            return None
        prior = engine.style(self.style, **({} if self.style_strength is None else {"strength": self.style_strength}))
        err().print(prior.describe(), style="yellow")
        return prior


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """None means: not given, the default of `SamplingParams` holds."""

    max_new_tokens: Annotated[int | None, _sampling("--max-new-tokens", "-n", help="Most tokens to generate.")] = None
    temperature: Annotated[float | None, _sampling("--temperature", "-t", help="0 is greedy, the default.")] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Keep the k likeliest tokens; 0 is off.")] = None
    top_p: Annotated[float | None, _sampling("--top-p", help="Keep the likeliest up to this mass.")] = None
    min_p: Annotated[float | None, _sampling("--min-p", help="Least probability against the likeliest.")] = None
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", help="Over prompt and output; 1 is none.")
    ] = None
    presence_penalty: Annotated[float | None, _sampling("--presence-penalty", help="Over the output; 0 is none.")] = (
        None
    )
    frequency_penalty: Annotated[float | None, _sampling("--frequency-penalty", help="Over the output; 0 is none.")] = (
        None
    )
    logit_bias: Annotated[
        list[str] | None, _sampling("--logit-bias", metavar="ID=BIAS", help="Add to a token's logit; repeatable.")
    ] = None
    bad_word: Annotated[
        list[str] | None, _sampling("--bad-word", metavar="TEXT", help="Never write this; repeatable.")
    ] = None
    seed: Annotated[int | None, _sampling("--seed", help="Repeat a sampled text; else a fresh one.")] = None
    stop: Annotated[list[str] | None, _sampling("--stop", metavar="TEXT", help="End before this text; repeatable.")] = (
        None
    )
    stop_token_id: Annotated[
        list[int] | None, _sampling("--stop-token-id", help="End with this token; repeatable.")
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on past the model's own end.")] = False
    min_new_tokens: Annotated[int | None, _sampling("--min-new-tokens", help="Fewest tokens to generate.")] = None
    samples: Annotated[int | None, _sampling("--samples", help="Independent samples of the prompt.")] = None
    logprobs: Annotated[
        int | None, _sampling("--logprobs", help="Log-probabilities with so many alternatives, in the JSON.")
    ] = None

    json_schema: Annotated[
        str | None,
        _form("--json-schema", metavar="FILE", help="The text is JSON of this schema, a file or JSON itself."),
    ] = None
    regex: Annotated[str | None, _form("--regex", help="The whole text matches this regular expression.")] = None
    grammar: Annotated[
        str | None, _form("--grammar", metavar="FILE", help="The text follows this grammar: EBNF or Lark.")
    ] = None
    choice: Annotated[
        list[str] | None, _form("--choice", metavar="TEXT", help="The text is this or another choice; repeatable.")
    ] = None
    structural_tag: Annotated[
        str | None, _form("--structural-tag", metavar="FILE", help="Where which form holds, in xgrammar's JSON.")
    ] = None
    quote: Annotated[bool, _form("--quote", help="The text is a stretch of the prompt, word for word.")] = False
    quote_marks: Annotated[
        str | None, _form("--quote-marks", metavar="'OPEN CLOSE'", help="Only what stands between these two tokens is.")
    ] = None
    free_spacing: Annotated[bool, _form("--free-spacing", help="JSON may have any white space.")] = False

    def params(self, **defaults: Any) -> SamplingParams:
        """Checked before a model is loaded; see also `extra`."""
        same = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                "frequency_penalty", "seed", "stop", "min_new_tokens", "logprobs")  # fmt: skip
        given = {name: getattr(self, name) for name in same}
        given |= {"stop_token_ids": self.stop_token_id, "n": self.samples, "ignore_eos": self.ignore_eos or None}
        given |= {"logit_bias": parse_bias(self.logit_bias) if self.logit_bias else None}
        given |= {"json_schema": _source("--json-schema", self.json_schema, "{"), "regex": self.regex,
                  "grammar": _source("--grammar", self.grammar, "::="), "choices": self.choice,
                  "structural_tag": _source("--structural-tag", self.structural_tag, "{"),
                  "quote": self.quote or None, "free_spacing": self.free_spacing or None}  # fmt: skip
        return SamplingParams(**defaults | {name: value for name, value in given.items() if value is not None})

    @property
    def extra(self) -> dict[str, Any]:
        """What only the loaded engine can check: words as text need its tokenizer."""
        if "" in (self.bad_word or ()):
            raise InputError("--bad-word is empty: give at least one character")
        marks = {"quote": self.quote_marks} if self.quote_marks else {}
        return marks | ({"bad_words": self.bad_word} if self.bad_word else {})


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """name=value; a value that reads as a number or true/false is one."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--option {pair}: write it as name=value, such as budget=16")
        try:
            options[name.strip()] = json.loads(value)
        except ValueError:
            options[name.strip()] = value
    return options


def parse_bias(pairs: list[str]) -> dict[int, float]:
    try:
        split = [pair.split("=") for pair in pairs]
        return {int(token): float(bias) for token, bias in split}
    except ValueError:
        raise InputError(f"--logit-bias {' '.join(pairs)}: write it as token id=number, such as 42=-1.5") from None


def _source(name: str, given: str | None, sign: str) -> str | None:
    """What a file holds, or the text itself where the sign of one is in it."""
    if given is None or sign in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} {given}: cannot be read ({error}); give an existing file") from None
