"""What holds for every command: one-line errors and exit statuses, an optional value for --json, quiet libraries.

Status 0: done. 1: a defect of ours. 2: something the caller can mend. 130: interrupted.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from outrider.core.errors import OutriderError

STDOUT = "-"  # where `--json` without a file goes
STAND_ALONE = {"--json": STDOUT, "--plant-bug": "all"}
FORCE = "--force"
NARROW = 76  # columns below which tables of options would cut names off
_debug = False
_forced = False
_asked: list[str] = []  # the arguments of this command, as they were given


class Shell(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _asked[:] = args
        with one_line_errors():
            return super().parse_args(ctx, force_first(fill_optional(args)))

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


def fit_help(app: typer.Typer) -> None:
    """In a narrow terminal help is plain lines, an option's name above what it does."""
    columns = shutil.get_terminal_size().columns
    if columns >= NARROW:
        return
    app.rich_markup_mode = None
    context = Shell.context_class
    formatter: Any = context.formatter_class

    class Lines(formatter):
        def __init__(self, **_: Any) -> None:
            super().__init__(width=columns - 1)

        def write_dl(self, rows: Any, col_max: int = 2, col_spacing: int = 2) -> None:
            super().write_dl(rows, col_max, col_spacing)

    context.formatter_class = Lines


def fill_optional(args: Sequence[str]) -> list[str]:
    """A value for options that may stand alone (`--json`: standard output): the option parser wants one."""
    filled: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return [*filled, *args[i:]]
        last_or_option = i + 1 == len(args) or (args[i + 1].startswith("-") and args[i + 1] != STDOUT)
        filled.append(f"{arg}={STAND_ALONE[arg]}" if arg in STAND_ALONE and last_or_option else arg)
    return filled


def force_first(args: Sequence[str]) -> list[str]:
    """`--force` belongs to all commands, and may stand anywhere."""
    end = list(args).index("--") if "--" in args else len(args)
    rest = [arg for arg in args[:end] if arg != FORCE]
    return [FORCE][: end - len(rest)] + rest + list(args[end:])


def forced() -> bool:
    """Whether files that are not ours may be overwritten."""
    return _forced


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Nobody but a developer wants a traceback."""
    try:
        yield
    except OutriderError as error:
        _leave(2, f"error: {_line(error)}", error)
    except KeyboardInterrupt as interrupt:
        _leave(130, "interrupted", interrupt)
    except BrokenPipeError as error:  # the reader has left; nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1, "", error)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if (told := _usage(error)) is not None:
            _leave(2, told, error)
        if _debug or hasattr(error, "exit_code"):  # help in place of an error
            raise
        _leave(
            1, f"error: {type(error).__name__}: {_line(error)}; a defect: run outrider --debug ... to see where", error
        )


@contextmanager
def resumable() -> Iterator[None]:
    """For commands that go on where they were when they are run again: an interrupt says with which words."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _leave(130, "" if os.environ.get("RANK", "0") != "0" else f"interrupted; go on with: {again()}", interrupt)


def again() -> str:
    """This very command, to be pasted into a shell."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return shlex.join([*("accelerate launch -m outrider" if launched else "outrider").split(), *_asked])


def _leave(status: int, message: str, cause: BaseException) -> None:
    if message:
        typer.echo(message, err=True)
    raise typer.Exit(status) from cause


def _line(said: object) -> str:
    return " ".join(str(said).split())


def _usage(error: Exception) -> str | None:
    """What the option parser refuses, with where to look; None of other errors, and of help that nobody asked for."""
    message = getattr(error, "format_message", None)
    if message is None or type(error).__name__ == "NoArgsIsHelpError":
        return None
    context = getattr(error, "ctx", None)
    said = _line(message()).replace(". Did you", "; did you").rstrip(".?")
    where = "outrider" if context is None else context.command_path
    return f"error: {said[:1].lower()}{said[1:]}; see {where} --help"


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


def prepare(debug: bool, force: bool = False) -> None:
    """Logging to standard error; other libraries' notes only for those who asked."""
    global _debug, _forced
    _debug, _forced = debug, force
    logger = logging.getLogger("outrider")
    logger.handlers[:] = [logging.StreamHandler()]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    if not debug:
        logger.handlers[0].setFormatter(_OneLine())
        warnings.simplefilter("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[list[bool]]:
    """The first Ctrl-C calls `act` and marks the yielded list, so that work ends between steps; a second one raises."""
    pressed: list[bool] = []

    def handle(*_: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)
        act()

    if threading.current_thread() is not threading.main_thread():  # signals cannot be handled there
        yield pressed
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
