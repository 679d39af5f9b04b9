"""`outrider chat`: a conversation in the terminal. Lines from a pipe work as well as a keyboard."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, StyleOptions
from outrider.cli.output import err, stats_table, status_line
from outrider.cli.shell import on_interrupt
from outrider.errors import InputError

if TYPE_CHECKING:
    from outrider.generation import Stats
    from outrider.params import SamplingParams

HELP = "/reset forgets the conversation · /stats shows the session's statistics · /exit leaves · Ctrl-C stops an answer"


def chat(
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    *,
    model: ModelOptions,
    sampling: SamplingOptions,
    style: StyleOptions,
) -> None:
    """Talk with a model; answers stream, with tokens/s and accepted length after each.

    /reset forgets the conversation, /stats shows statistics, /exit leaves. Ctrl-C stops an answer and keeps what was
    said; a second Ctrl-C, or Ctrl-D, leaves.
    """
    params = sampling.params(max_new_tokens=512)
    if params.n != 1:
        raise InputError("--samples: a chat has one answer a turn; leave it out")
    style.check()
    with model.load() as engine:
        prior = style.constraint(engine)
        extra = sampling.extra | ({"constraint": prior} if prior else {})
        session = _Session(engine, params, extra, system)
        err().print(f"{model.model} with {model.method} · {HELP}", style="dim")
        try:
            for line in _lines():
                if not session.take(line.strip()):
                    break
        except KeyboardInterrupt:
            pass
        err().print("bye", style="dim")


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history at the prompt)
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stderr.write("\n")
            return


class _Session:
    """The history of one conversation and its pooled statistics. Changes state with every line."""

    def __init__(self, engine: Any, params: SamplingParams, extra: dict[str, Any], system: str | None) -> None:
        self.engine, self.params, self.extra = engine, params, extra
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.total: Stats | None = None

    def take(self, line: str) -> bool:
        """One line from the user; False ends the session."""
        if line == "/exit":
            return False
        if line == "/reset":
            self.messages = list(self.opening)
            err().print("forgotten", style="dim")
        elif line == "/stats":
            err().print(stats_table(self.total) if self.total else "nothing was said yet")
        elif line.startswith("/"):
            err().print(HELP, style="dim")
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            handle = self.engine.submit(asked, self.params, **self.extra)
        except InputError as error:  # most often a conversation longer than the context
            err().print(f"error: {error}; /reset begins anew", markup=False)
            return
        with on_interrupt(handle.cancel):
            for piece in handle.pieces():
                sys.stdout.write(piece)
                sys.stdout.flush()
            answer = handle.result()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        note = " · stopped" if answer.finish_reason == "cancelled" else ""
        err().print(status_line(answer.stats) + note, style="dim")
        self._count(answer.stats)

    def _count(self, stats: Stats) -> None:
        if self.total is None:
            self.total = type(stats)(method=stats.method)
        self.total.add(stats)
