"""`outrider generate`: one prompt, its text as it comes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.cli.options import ModelOptions, SamplingOptions, StyleOptions
from outrider.cli.output import Json, check_json, emit, err, out, start_rows, stats_table
from outrider.cli.paint import Painter, legend
from outrider.cli.shell import STDOUT, on_interrupt
from outrider.core.errors import InputError
from outrider.core.text import token_decoder

if TYPE_CHECKING:
    from outrider.core.generation import Generation
    from outrider.core.params import SamplingParams


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to answer.", show_default=False)
    ] = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="Take the prompt from a file; - is stdin.")] = None,
    prediction: Annotated[
        str | None, typer.Option("--prediction", metavar="FILE", help="The text expected, to draft from; - is stdin.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Speed, acceptance and times after the text.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Colour tokens by origin: target or draft depth.")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the text when it is complete.")] = False,
    json: Json = None,
    *,
    model: ModelOptions,
    sampling: SamplingOptions,
    style: StyleOptions,
) -> None:
    """Generate text for one prompt.

    Ctrl-C ends the text where it is; what was asked for besides (--stats, --json) still comes.
    """
    prompt, json = _untangle(prompt, file, json)
    expected = {} if prediction is None else {"prediction": _expected(prediction, file)}
    text = _read(prompt, file)
    params, extra = sampling.params(), sampling.extra | expected
    check_json(json)
    style.check()
    with model.load() as engine:
        prior = style.constraint(engine)
        messages = text if raw else [{"role": "user", "content": text}]
        handle = engine.submit(messages, params, **extra, **({"constraint": prior} if prior else {}))
        stream = not no_stream and params.n == 1 and json != STDOUT
        screens = [Screen(_painter(engine, params) if show else None, stream) for _ in range(params.n)]
        with on_interrupt(handle.cancel) as interrupted:
            generations = _run(handle, screens[0], interrupted)
        started = {"seconds": engine.phases, "bytes": engine.footprint()}
        rows = start_rows(engine)
    if json != STDOUT:
        for screen, generation in zip(screens, generations, strict=True):
            screen.finish(generation)
        if show:
            err().print(legend([o for g in generations for o in g.origins], _colours()))
    if stats:
        for g in generations:
            mass = (
                {} if g.mean_legal_mass is None else {"legal mass": f"{g.mean_legal_mass:.3f} of a token's probability"}
            )
            more = mass | (rows if g is generations[0] else {})
            err().print(stats_table(g.stats, finish=f"{g.finish_reason}, seed {g.seed}, sample {g.sample}", **more))
    emit(json, {"model": model.model, "method": model.method, "prompt": text,
                "style": prior and {"file": style.style, "strength": prior.strength, "changes_distribution": True},
                "start": started, "generations": [g.as_dict() for g in generations]})  # fmt: skip
    if interrupted:
        raise typer.Exit(130)


def _run(handle: Any, screen: Screen, interrupted: list[bool]) -> list[Generation]:
    try:
        for piece in handle.pieces():
            if screen.stream:
                screen.grow(piece, handle.partial()[0])
        return list(handle.results())
    except KeyboardInterrupt:  # pressed twice: do not wait for the step to end
        interrupted.append(True)
        return list(handle.partial())


@dataclass(slots=True)
class Screen:
    """Where one text goes: as it comes or at its end, coloured by origin where there is a painter. Changes state."""

    painter: Painter | None
    stream: bool
    written: int = 0

    def grow(self, piece: str, generation: Generation) -> None:
        self._write(self.painter.grow(generation) if self.painter else piece)
        self.written += len(piece)

    def finish(self, generation: Generation) -> None:
        self._write(self.painter.finish(generation) if self.painter else generation.text[self.written :])
        self._write("\n")

    def _write(self, text: str | Text) -> None:
        if isinstance(text, str):  # exactly as it is: a terminal library would wrap and tidy
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            out().print(text, end="", soft_wrap=True)


def _painter(engine: Any, params: SamplingParams) -> Painter:
    return Painter(token_decoder(engine.tokenizer), params.stop, params.stop_token_ids, _colours())


def _colours() -> bool:
    console = out()
    return console.color_system is not None and not console.no_color


def _untangle(prompt: str | None, file: str | None, json: str | None) -> tuple[str | None, str | None]:
    """`generate --json "a prompt"`: the parser took the prompt for the option's file, but there is no other prompt."""
    if prompt is None and file is None and json not in (None, STDOUT) and not str(json).endswith(".json"):
        return json, STDOUT
    return prompt, json


def _expected(source: str, file: str | None) -> str:
    if source == file == "-":
        raise InputError("the prompt and --prediction both come from standard input; give one of them as a file")
    text = _text_of(source)
    if not text:
        raise InputError(f"--prediction {source}: is empty; give the text you expect, or leave it out")
    return text


def _read(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise InputError("a prompt and --file were both given; give one of them")
    if file is not None:
        prompt = _text_of(file)
    if prompt is None:
        raise InputError('there is no prompt; write it behind the command, as in: outrider generate "Hello"')
    if not prompt.strip():
        raise InputError("the prompt is empty; give at least one word")
    return prompt


def _text_of(source: str) -> str:
    from outrider.store.prompts import read_stdin, read_text  # with stores, which compile: not for `--help`

    return read_stdin() if source == "-" else read_text(source)
