"""The command: what it is asked, and its suggestions, shown again after every token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.cli.options import MeasuredModel
from outrider.cli.output import Json, check_json, emit, out
from outrider.cli.shell import STDOUT
from outrider.core.errors import InputError

if TYPE_CHECKING:
    from outrider.search.suggestions import Suggestion

LOSSY = "lossy: the model reads a mixture of the suggestions"


def suggest(
    prompt: Annotated[str, typer.Argument(help="The text to go on with.")],
    count: Annotated[int, typer.Option("-k", "--count", help="So many suggestions.")] = 5,
    length: Annotated[int, typer.Option("--length", help="Tokens of each, at most; short ones are best.")] = 10,
    alpha: Annotated[float, typer.Option("--alpha", help="How much n-grams say of whose token one is.")] = 0.54,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="STORE", help="Count n-grams there (outrider index build), not in the text."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Begin an answer to the text: with the chat template.")] = False,
    json: Json = None,
    *,
    model: MeasuredModel,
) -> None:
    """Suggest several short ways to go on with a text, for one pass of the model a token.

    LOSSY (superposed decoding): the model reads a mixture of the suggestions, so none is quite what it would say alone.
    """
    check_json(json)
    if not prompt.strip():
        raise InputError("the text is empty; give at least one word")
    if not 0 <= alpha <= 1:
        raise InputError(f"--alpha {alpha:g}: use 0 to 1")
    from outrider.core.rows.superposed import Superposition
    from outrider.methods.common import check_store, embedding
    from outrider.search.suggestions import suggestions

    check_store(str(store or ""))
    with model.load(max_slots=1) as engine:
        grams = _corpus(engine, store) if store is not None else None
        ids = engine.encode_chat(prompt) if chat else engine.encode(prompt)
        begun, found, rows = time.perf_counter(), list["Suggestion"](), list[dict[str, Any]]()
        with _screen(json) as screen:
            for found in suggestions(
                engine.target, ids, embedding(engine.target, engine.loaded), count, length,
                how=Superposition(alpha=alpha), grams=grams, ends=engine.loaded.eos_ids,
            ):  # fmt: skip
                rows = _rows(engine.tokenizer.decode, ids, found)
                screen(rows)
        seconds = time.perf_counter() - begun
    emit(json, {"prompt": prompt, "lossless": False, "seconds": seconds, "suggestions": rows})


def _corpus(engine: Any, store: Path) -> Any:
    from outrider.store.store import open_store
    from outrider.store.tokens import fingerprint

    return open_store(store, fingerprint(engine.tokenizer), engine.loaded.name)


def _rows(decode: Any, prompt: Sequence[int], found: Sequence[Suggestion]) -> list[dict[str, Any]]:
    """As text: what stands behind the prompt's, whose last token may need the next one to be read."""
    before = len(decode(list(prompt)))
    return [
        {"text": decode([*prompt, *one.tokens])[before:], "tokens": list(one.tokens), "share": one.share,
         "ended": one.ended}
        for one in found
    ]  # fmt: skip


class _screen:
    """Lines that are written over as they grow on a terminal; elsewhere the last ones only."""

    def __init__(self, json: str | None) -> None:
        self._live: Any = None
        self._rows: list[dict[str, Any]] = []
        self._shown = json != STDOUT

    def __enter__(self) -> Any:
        if self._shown and out().is_terminal:
            from rich.live import Live

            self._live = Live(console=out(), auto_refresh=False).__enter__()
        return self

    def __call__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        if self._live is not None:
            self._live.update(_lines(rows), refresh=True)

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)
        elif self._shown and self._rows:
            out().print(_lines(self._rows), soft_wrap=True)
        if self._shown and self._rows:
            out().print(LOSSY, style="dim")


def _lines(rows: Sequence[dict[str, Any]]) -> Text:
    return Text("\n").join(
        Text.assemble((f"{row['share']:4.0%}  ", "dim"), row["text"].replace("\n", " ")) for row in rows
    )
